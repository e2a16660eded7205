"""Single training steps, explained: what they trained on, what they were made with, and some of their tokens."""
