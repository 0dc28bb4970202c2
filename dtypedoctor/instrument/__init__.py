"""Measures a running model: module watch, op trace, autocast, quantisation state, optimizer and scaler."""
