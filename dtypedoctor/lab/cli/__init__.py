"""The verbs that make further runs."""
