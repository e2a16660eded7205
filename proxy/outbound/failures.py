"""The ways in which a request to a user's URL fails. The messages are for the user who named the URL."""

from __future__ import annotations


class TargetRefused(Exception):
    """base-rl does not send to this URL, by its form or its address. Only a changed URL or setting helps."""


class TargetFailed(Exception):
    """The target could not be reached or did not answer in time. A retry may succeed."""
