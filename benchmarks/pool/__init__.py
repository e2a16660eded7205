"""Several runs and several engines under load: `make bench-fair`, `make bench-engines`, `make bench-adapters`,
`make bench-swap`."""
