"""``ddplab study traces``: changes predicted from traces, then made."""
