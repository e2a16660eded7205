"""An engine without a model: `python -m proxy.engines.scripted --help`.

It speaks SGLang's native API as the other engines do, and answers by the rules of a script: to check an agent's
wiring, for tests and for benchmarks. Nothing that it says was generated, and its log-probabilities are stand-ins.

How a request goes: `server.py` (HTTP) → `wire.py` (what is asked) → `matching.py` (what the last message of the
prompt says, and which rule of `script.py` answers it) → `answers.py` (the answer as token ids, as the template of the
model would write it) → `generation.py` (its tokens, one after another, at the script's pace).
"""
