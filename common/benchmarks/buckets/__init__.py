"""Measurements of buckets and all-reduces: assignment 2."""
