"""Export and import of complete sessions and of preferences: JSON lines, and Parquet in the Hugging Face layout."""
