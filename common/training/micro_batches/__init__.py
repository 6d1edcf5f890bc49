"""Training whose ranks get micro-batches of other sizes."""
