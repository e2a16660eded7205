"""One hostile client, and what the others notice of it."""
