"""Which modules, which corrections, which mode: the smallest culprit of a failure, found by running. No torch."""
