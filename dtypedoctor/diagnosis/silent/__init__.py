"""Failures that raise nothing and leave finite values behind, read from what the silent checks have observed."""
