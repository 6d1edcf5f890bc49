"""Evaluates predictions for clusters of thousands of GPUs, and of NCCL's all-reduce."""
