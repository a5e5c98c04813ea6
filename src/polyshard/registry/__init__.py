"""Which strategies exist, and from a config to the plugin that answers for it."""
