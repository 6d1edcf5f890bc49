"""Measurements of scaling: assignment 4."""
