"""Summarises a run in at most ten numbers, each with its spread and what it means."""
