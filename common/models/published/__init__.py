"""Models of published measurements, each written from its paper and its public configuration."""
