"""Processes that this project starts, and how they end."""
