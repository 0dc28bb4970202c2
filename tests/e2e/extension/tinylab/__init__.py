"""A small library that has a gated layer of its own."""
