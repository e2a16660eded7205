"""The engine for machines without SGLang, a process of its own: `python -m proxy.engines.embedded --help`.

Nothing else in the proxy imports this package; the proxy reaches it over HTTP, as it does SGLang. The path of a
request: `server.py` and `generate.py` (HTTP) → `scheduler.py` (one thread, one running batch) → `model.py` (forward
passes over `cache.py`) → `sampling.py` → `stopping.py` → back to `generate.py`.
"""
