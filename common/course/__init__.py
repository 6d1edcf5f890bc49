"""The course: its tasks, a student's tree without their solutions, and what it may not show."""
