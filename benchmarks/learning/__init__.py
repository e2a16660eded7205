"""Whether every preset learns: agents in one process, the trainer's own batching, losses and optimiser, and policies
of a given staleness."""
