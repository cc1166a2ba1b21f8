"""The papers' tables and claims, run and judged by `kontrast reproduce`."""
