"""`kontrast reproduce`: the papers' tables, run cell by cell, and their claims, judged by the results."""
