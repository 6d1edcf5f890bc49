"""Numbers that questions ask for, recomputed from a student's own tables."""
