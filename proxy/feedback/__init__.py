"""Rewards and preferences that clients post: the append-only ledger, with late and revised entries."""
