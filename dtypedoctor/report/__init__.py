"""One Report value and its renderers. No torch."""
