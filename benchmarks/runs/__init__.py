"""Many adapter runs over one base model, on one engine and one trainer: `python -m benchmarks.runs`."""
