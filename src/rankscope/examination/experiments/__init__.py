"""What is tried on a model: each experiment writes an outcome with that of its control."""
