"""`kontrast compare`: several recipes trained on the same data, with the same seeds and the same budget."""
