"""Tables of collectives as benchmarks print them."""
