"""What torch.profiler's traces say: operators, phases, overlap of communication, DDP's buckets."""
