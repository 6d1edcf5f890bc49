"""What the measurements say: evaluation, tables and figures. A leaf: NumPy and pandas only."""
