"""Kernels on trial: each custom autograd Function, operator and compiled region that a step calls is called again with one thing changed."""
