"""Any model on a cluster: its steps, its memory and its plans."""
