"""Evidence for the course: gradings, and another course's tests."""
