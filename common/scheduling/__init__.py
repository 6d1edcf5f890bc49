"""Assignment of a step's samples to ranks, such that all ranks finish at the same time."""
