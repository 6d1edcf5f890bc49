"""What is handed in: names of students, and the tarball as it was read."""
