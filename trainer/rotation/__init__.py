"""Several runs on one trainer: they take turns when they have a batch, and share time as their weights say.

`turns.py` gives the turns, `roster.py` decides which runs there are, `arrivals.py` waits for proxies that are down,
and `following.py` asks a proxy for its active runs.
"""
