"""Find and replace text that must not be stored, in texts and in token ids."""
