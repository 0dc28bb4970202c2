"""Installing corrective code in a live model. What is installed is in the laboratory, or comes from a plug-in."""
