"""What students write: one file a task, with the reference solution between markers."""
