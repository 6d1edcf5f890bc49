"""A job's operations as a graph, run again as they were and with a change."""
