"""Evaluates DDP's buckets, measured and predicted (assignment 2)."""
