"""Analysis of micro-batches of texts of varying length (assignment 3)."""
