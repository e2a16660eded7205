"""The cost of a training step on one GPU: use of its arithmetic, shared prefixes, chunks of log-probabilities."""
