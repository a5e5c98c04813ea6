"""The training that the ``polyshard`` command runs: a small language model on text."""
