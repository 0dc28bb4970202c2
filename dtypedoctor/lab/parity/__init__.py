"""Splits the gap of a generator and a trainer by scoring what was generated again, with one thing changed at a time."""
