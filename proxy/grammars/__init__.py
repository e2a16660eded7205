"""The language of constraints: JSON schemas that can be enforced, and structural tags. Pure."""
