"""``ddplab explore``: the model of a step, and micro-batches, with sliders."""
