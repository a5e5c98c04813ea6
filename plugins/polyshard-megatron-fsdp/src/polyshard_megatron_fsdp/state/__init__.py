"""State that goes in and out: state dicts, checkpoints, parameters that a script replaces."""
