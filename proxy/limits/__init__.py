"""Rate limits of runs, shared by all proxies on one store."""
