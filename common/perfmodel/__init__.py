"""Predictions of time and memory. A leaf: NumPy and pandas only, so that they start at once."""
