"""Runs a part of a program again without starting it again: processes that stand by from a moment of its run, and go on from there."""
