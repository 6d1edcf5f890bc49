"""What measurements say of training under DDP and FSDP (assignment 1)."""
