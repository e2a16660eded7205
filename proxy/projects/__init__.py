"""Projects: runs that belong together, their keys and the limits that they share."""
