"""The effect of one hostile client on all others."""
