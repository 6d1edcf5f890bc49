"""Steps on one and on N ranks, and what a change would make of them."""
