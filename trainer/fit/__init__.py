"""Fitting to chosen data: sessions to imitate, preferences to follow, or preferences to train a reward model on. It
works beside the loop, which learns from claims, and publishes the same kind of versions."""
