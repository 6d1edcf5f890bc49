"""What every script needs: ranks, device, seeds, clocks, run directories, environment record."""
