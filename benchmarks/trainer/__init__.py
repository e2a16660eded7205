"""What a training step costs: packings beside each other and beside TRL, and the memory of log-probabilities."""
