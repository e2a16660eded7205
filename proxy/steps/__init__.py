"""Committed steps, rebuilt from the store as their trainers saw them."""
