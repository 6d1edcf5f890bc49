"""What ``ddplab doctor`` checks beyond its own rows: GPUs, and the self-test."""
