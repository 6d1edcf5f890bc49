"""Something to import."""

ANSWER = 42
