"""How often the diagnosis is right: faults planted in runs and scripts."""
