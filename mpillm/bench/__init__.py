"""What `mpillm bench` measures: the machine, and a model on it. Calls the engine; the engine knows nothing of it."""
