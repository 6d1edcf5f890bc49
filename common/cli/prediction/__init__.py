"""The answers of ``ddplab predict``: a report from tables, a trace of a step, many GPUs."""
