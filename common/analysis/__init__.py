"""Evaluates measurements, in tables and figures. A leaf: NumPy and pandas only."""
