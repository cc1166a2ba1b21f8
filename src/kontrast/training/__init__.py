"""Pretraining: recipe resolution, learner, step, loop, checkpoints, signals."""
