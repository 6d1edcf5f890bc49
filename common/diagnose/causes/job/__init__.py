"""Causes that are judged from what a job left behind."""
