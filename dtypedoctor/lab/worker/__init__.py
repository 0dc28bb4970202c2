"""The process that runs a scenario."""
