"""Grades: hidden tests of submissions, points of answers, and the class's tables."""
