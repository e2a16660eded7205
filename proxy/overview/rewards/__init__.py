"""Read models of the reward ledger: entries, rewards revised after training, and preferences."""
