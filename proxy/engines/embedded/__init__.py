"""An engine of its own process for machines without SGLang: `python -m proxy.engines.embedded --help`.

Nothing else in the proxy imports this package; it is reached by HTTP, as SGLang is. How a request goes:
`server.py` (HTTP) → `scheduler.py` (one thread, one running batch) → `model.py` (forward passes over `cache.py`)
→ `sampling.py` → `stopping.py` → back to `server.py`.
"""
