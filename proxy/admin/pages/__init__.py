"""The pages under /admin, one module per concern."""
