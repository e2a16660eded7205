"""Sessions: opened, found for every model call, ended, swept."""
