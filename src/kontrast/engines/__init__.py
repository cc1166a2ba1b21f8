"""Where training and embedding run, if not in this process or under torchrun: `--engine ray`."""
