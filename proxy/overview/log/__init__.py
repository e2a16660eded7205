"""The event log of all runs."""
