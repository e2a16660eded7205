"""Batches of committed training steps, rebuilt from the store as their trainers received them."""
