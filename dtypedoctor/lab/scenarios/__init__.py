"""What to run: the Scenario value, its YAML file, and the list of known scenarios. No torch."""
