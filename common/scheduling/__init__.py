"""Which samples each rank takes in a step, so that ranks with texts of any length end together."""
