"""A finished run and its verbs: probe, lens, embed, neighbors, duplicates, export."""
