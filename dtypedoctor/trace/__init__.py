"""The record of one run on disk: events, writer, reader. No torch."""
