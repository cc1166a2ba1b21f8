"""Questions that take many runs: comparisons and sweeps, audits, the papers' tables and claims."""
