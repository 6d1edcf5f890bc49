"""Architectures: the sizes of any model, from its configuration, a published name or its code."""
