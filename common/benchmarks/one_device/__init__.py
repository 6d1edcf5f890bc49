"""Measurements of one device: assignment 0."""
