"""What a capsule is, and the script that is made of one. It knows neither traces nor torch."""
