"""Rewards, texts and preferences that clients post: append-only, with late and revised entries."""
