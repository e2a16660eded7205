"""Whether a version may serve: evidence about it, the sequential test that compares it, and the decision."""
