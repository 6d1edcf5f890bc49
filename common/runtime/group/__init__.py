"""Process groups, the network below them, and clocks of collectives."""
