"""Exercises of the students: one file a task, with the reference solution between markers."""
