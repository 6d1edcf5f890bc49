"""Steps taken apart for assignment 4."""
