"""The diagnosis as a page."""
