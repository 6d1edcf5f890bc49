"""Measurements of micro-batches: assignment 3."""
