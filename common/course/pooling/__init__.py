"""What a class has measured together: a quantity of each student's, pooled into one interval."""
