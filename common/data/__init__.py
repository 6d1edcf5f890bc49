"""Batches to train on."""
