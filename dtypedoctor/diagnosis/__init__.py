"""Reads traces and says what went wrong. No torch."""
