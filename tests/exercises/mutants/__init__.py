"""Wrong solutions: the mistakes that students make, each with the check that must find it.

A mutant is the reference with one piece of text replaced. ``ranks`` has those of the exercises that
run on several ranks, ``numbers`` those that one process can check. The first of each exercise is
tried in every run of the tests, the others where the grader is tested.
"""
