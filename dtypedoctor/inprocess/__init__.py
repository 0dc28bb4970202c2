"""Watching from inside a program: a context manager, and a callback for trainers. The top of the house: it may import all."""
