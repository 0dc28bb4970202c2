"""Installs a corrective kernel into a live model and verifies that it is really in place."""
