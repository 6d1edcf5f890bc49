"""One device: sizes of a model, memory, FLOPs, peaks of devices."""
