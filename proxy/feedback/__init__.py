"""Rewards in: the append-only ledger, late and revised entries included."""
