"""Corrective kernels, and beside each the faulty original that it replaces."""
