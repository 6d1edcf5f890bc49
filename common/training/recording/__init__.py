"""Tables and traces that a training run writes of its steps."""
