"""context_parallel: train on parts of a sequence, with attention over the whole of it."""
