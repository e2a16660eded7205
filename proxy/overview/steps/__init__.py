"""Read models of a training step: its trajectories, its inputs, and the tokens of some trajectories."""
