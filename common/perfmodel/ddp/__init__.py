"""DDP's backward pass and step: gradients, the recurrence of buckets, hooks."""
