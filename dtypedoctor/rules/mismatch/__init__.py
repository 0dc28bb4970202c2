"""Dtype mismatches."""
