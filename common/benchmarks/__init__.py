"""Measurements: each module is one benchmark, started by a thin script under assignments/."""
