"""Before and after: remedies, references, parity and bisection. No torch."""
