"""Judges: models that score sessions after their end, in background jobs.

The end of a session enqueues a job for each judge of its run (`lifecycle/judging.py`). The job shows the conversation
to the judge's model, reads scores from its answers, and writes a reward and a judgement in one transaction with its
completion. A judge that fails leaves no reward.
"""
