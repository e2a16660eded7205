"""Sessions out of a store and into another, whole: as JSON lines and as Parquet in the Hugging Face layout."""
