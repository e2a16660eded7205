"""How the trajectory store grows: `make bench-store`."""
