"""Run directories: what a measurement writes, and how it says that it is complete."""
