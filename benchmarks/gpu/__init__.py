"""What a training step takes on one GPU: use of its arithmetic, shared prefixes, chunks of log-probabilities."""
