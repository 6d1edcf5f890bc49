"""Where am I: ranks, device, seeds, clocks, run directories and the record of the environment."""
