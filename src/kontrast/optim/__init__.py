"""Optimizers and schedules, shared by training and by probes."""
