"""Compares two runs of the same model, module by module and step by step."""
