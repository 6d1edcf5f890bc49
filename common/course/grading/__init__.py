"""Grading without trust: a student's code in a sandbox, and the checks that call it outside."""
