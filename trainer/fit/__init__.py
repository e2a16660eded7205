"""Fitting to what somebody chose: sessions to imitate, preferences to follow or to rank by. Beside the loop, which
learns from claims, and through the same versions."""
