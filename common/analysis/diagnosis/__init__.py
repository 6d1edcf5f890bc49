"""Causes of slowness, judged from evidence, and the changes that remove them."""
