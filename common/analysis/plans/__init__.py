"""The answer of ``ddplab plan`` as a page with a figure."""
