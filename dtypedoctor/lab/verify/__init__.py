"""Whether a saved model is the trained one: it is loaded as its users load it, and compared with the live model or another saved one."""
