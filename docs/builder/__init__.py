"""What the documentation site is built with: one module per kind of page, and the checks."""
