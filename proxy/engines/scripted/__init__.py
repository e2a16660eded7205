"""An engine without a model: `python -m proxy.engines.scripted --help`.

It answers SGLang's native API by the rules of a script: to check an agent's wiring, for tests and for benchmarks. No
model generates its answers, and its log-probabilities are stand-ins.

The path of a request: `server.py` (HTTP) → `common/wire.py` (its fields) → `matching.py` (the last message of the
prompt, and the rule of `script.py` that answers it) → `answers.py` (the answer as token ids, in the form of the
model's template) → `generation.py` (its tokens, at the script's pace).
"""
