"""Examines a run that is over, as far as one run tells."""
