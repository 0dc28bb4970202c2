"""Checks for failures that raise nothing and leave finite values behind. Each writes observations that a detector reads."""
