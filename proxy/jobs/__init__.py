"""Background jobs: rows of the store that workers lease, run and complete.

Work is enqueued by `proxy/lifecycle/outbox.py` in the transaction that causes it. A worker leases due jobs, runs the
handler of their kind, and commits the handler's effect together with the completion. The database is the truth; a
message broker, where one is configured, carries ids only.
"""
