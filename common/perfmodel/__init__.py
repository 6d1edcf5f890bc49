"""Predictions. A leaf: NumPy and pandas only, so that predicting starts in a moment."""
