"""The model: the mesh and options that it is wrapped with, and what the wrap makes of it."""
