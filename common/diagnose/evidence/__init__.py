"""What a run or a watched script has left, as tables, and the model of its step."""
