"""What measurements say of DDP's buckets, measured and predicted (assignment 2)."""
