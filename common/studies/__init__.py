"""Evidence that a test is too short for: ``ddplab study``. Results are committed under data/."""
