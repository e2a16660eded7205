"""The cost of a training step: packings compared with each other and with TRL, and the memory of
log-probabilities."""
