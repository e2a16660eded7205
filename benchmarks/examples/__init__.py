"""The examples of `agents_examples/`, each with its tiny model, as a user runs them."""
