"""What the accuracy study found."""
