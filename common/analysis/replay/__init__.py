"""A job's traces as a program that can be run again, and what changes would gain."""
