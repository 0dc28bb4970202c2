"""What is found in models that have not run."""
