"""Erasure of sessions, on request by session or user, and by the retention rules of a run."""
