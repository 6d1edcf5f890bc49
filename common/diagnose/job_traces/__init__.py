"""Causes in the traces, flight recorders and logs that a job has left."""
