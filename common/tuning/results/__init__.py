"""What a tuning recommends, and how that is shown."""
