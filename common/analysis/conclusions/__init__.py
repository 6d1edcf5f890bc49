"""What the staff's answers conclude from measurements, as predicates over the tables of a run."""
