"""What a training run writes of its steps."""
