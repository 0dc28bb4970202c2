"""Where scenarios run: in workers on this machine, or as jobs of an executor."""
