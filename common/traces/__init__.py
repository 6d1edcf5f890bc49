"""Reads torch.profiler's traces: operators, phases, overlap of communication, DDP's buckets."""
