"""Read models of sessions and turns."""
