"""The ledger as people read it: its entries, what was revised after training, and preferences."""
