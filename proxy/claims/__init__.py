"""Leases of whole groups of trajectories to trainers."""
