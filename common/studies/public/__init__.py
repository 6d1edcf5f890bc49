"""``ddplab study public``: published multi-GPU measurements, predicted and scored."""
