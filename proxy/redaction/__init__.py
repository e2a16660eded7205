"""What must not be stored is found and replaced before it is: in text, and in token ids."""
