"""Clusters that nobody has measured: NCCL, stragglers, up to thousands of GPUs."""
