"""What a run found: at most ten numbers, each with its spread and what it means."""
