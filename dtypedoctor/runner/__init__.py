"""Starts workers, times them out and collects what they left. No torch."""
