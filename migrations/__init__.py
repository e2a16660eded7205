"""The history of the tables in `proxy.database.tables`, applied by `proxy.database.migrate` at start."""
