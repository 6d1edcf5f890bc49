"""Predicted steps over an exchange of known duration."""
