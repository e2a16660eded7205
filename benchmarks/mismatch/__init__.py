"""Learning from an engine that computes something else than the trainer, with different corrections."""
