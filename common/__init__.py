"""ddplab: measure, predict, verify and explain data-parallel training in PyTorch."""

__version__ = "0.1.0"
