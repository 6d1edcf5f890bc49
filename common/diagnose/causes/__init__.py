"""Causes of slowness: each judges the evidence and says what it costs."""
