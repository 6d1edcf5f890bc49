"""Speedups, laws of scaling and scaling studies (assignment 4)."""
