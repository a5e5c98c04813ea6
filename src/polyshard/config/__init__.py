"""Config classes: their fields and checks, and the files that they are read from."""
