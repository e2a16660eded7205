"""Requests to URLs that users name: webhooks and verifiers. No other code of the proxy may send such requests.

Whoever may name a URL must not reach through it what only the proxy's machine can reach: the engines, the cloud's
metadata service, other machines of the network. Every request therefore goes to an address that was checked.
"""
