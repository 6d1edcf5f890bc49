"""Serves every script: ranks, device, seeds, clocks, run directories, environment record."""
