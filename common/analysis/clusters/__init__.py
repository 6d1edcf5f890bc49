"""What measurements say of predictions for clusters of thousands of GPUs, and NCCL's all-reduce."""
