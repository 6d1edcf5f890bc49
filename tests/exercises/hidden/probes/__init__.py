"""What checks run in a student's process: scenes and looks, no expected value."""
