"""Recipes: one TOML file per row of a paper's table. `kontrast.config` reads them."""
