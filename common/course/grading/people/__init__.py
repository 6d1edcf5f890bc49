"""Who is who in a class, and whose a hand-in is."""
