"""Plans run for real: a model under a strategy, what predictions start from, and verification."""

from __future__ import annotations

from pathlib import Path

JOB = Path(__file__).with_name("job.py")
ANSWER, PRINTED = "plan.json", "plan.txt"
"""Files of the run directory: the answer as plain values, and as it is printed."""
