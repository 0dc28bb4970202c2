"""What is done with a model: one file per workload."""
