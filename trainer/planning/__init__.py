"""How much memory a trainer's ranks need, computed before anything is loaded (`base-rl plan`)."""
