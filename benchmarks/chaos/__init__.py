"""kill -9 at random times, and an account of what was promised: `make chaos`."""
