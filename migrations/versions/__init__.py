"""One migration per change of the tables."""
