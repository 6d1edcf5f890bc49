"""The recommendation of a tuning, and its presentation."""
