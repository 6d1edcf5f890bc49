"""Prints what it sees of itself."""

import sys

from .helper import ANSWER

print(ANSWER, __name__, __package__, sys.argv[1:])
sys.exit(3)
