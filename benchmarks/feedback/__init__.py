"""Learning from feedback in words, beside learning from numbers."""
