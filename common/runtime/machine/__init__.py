"""What this machine is: devices, memory, cores, software."""
