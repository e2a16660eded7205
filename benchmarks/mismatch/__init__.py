"""Learning from an engine that computes something else than the trainer: which correction keeps learning."""
