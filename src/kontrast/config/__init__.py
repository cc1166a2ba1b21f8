"""The recipe: its dataclasses, reading TOML, overrides, and suggestions for misspelled keys."""
