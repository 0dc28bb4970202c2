"""Non-finite values."""
