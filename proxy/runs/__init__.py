"""Runs and their settings."""
