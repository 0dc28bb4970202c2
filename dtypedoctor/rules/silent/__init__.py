"""Failures that nothing raises."""
