"""Measurements of one device: memory, throughput and the time of a step (assignment 0)."""
