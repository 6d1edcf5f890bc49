"""Evaluates training under DDP and FSDP (assignment 1)."""
