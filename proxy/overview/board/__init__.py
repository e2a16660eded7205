"""All runs at a glance, read together."""
