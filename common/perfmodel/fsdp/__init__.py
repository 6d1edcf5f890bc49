"""FSDP: the collectives of a step, what they send, and when."""
