"""Why data-parallel training is slow, in anybody's script, and what a change would gain."""
