"""The growth of the trajectory store: `make bench-store`."""
