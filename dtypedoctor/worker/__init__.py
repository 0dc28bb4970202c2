"""The watched process: read the request, build, instrument, do the steps, end the trace."""
