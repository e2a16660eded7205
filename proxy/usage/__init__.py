"""The limits of runs, projects and keys with what is used of them, over HTTP."""
