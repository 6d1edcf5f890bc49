"""The sandbox that student code runs in, and the connection by which checks call it."""
