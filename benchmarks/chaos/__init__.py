"""kill -9 at random times, and a check of every promise afterwards: `make chaos`."""
