"""Several recipes on the same data, seeds and budget."""
