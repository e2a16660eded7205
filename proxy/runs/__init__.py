"""The runs of this proxy and their settings."""
