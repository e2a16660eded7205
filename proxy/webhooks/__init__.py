"""Webhooks: events of the log, posted to URLs that users name.

A webhook follows the event log from its creation on (`following.py`). Each event that it subscribes to becomes a job,
in one transaction with the webhook's new place in the log, and the job posts it (`delivering.py`): at least once,
with an id that stays the same in every attempt.
"""
