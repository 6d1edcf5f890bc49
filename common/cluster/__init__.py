"""Starting ranks: torchrun here, emulated hosts and Slurm with their issues."""
