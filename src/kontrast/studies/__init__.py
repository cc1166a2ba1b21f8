"""Questions that take many trainings: comparisons with sweeps, and audits of suppressed features."""
