"""The models that the assignments train."""
