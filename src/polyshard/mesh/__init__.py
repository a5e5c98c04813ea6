"""The device mesh: its dimensions, its ranks and its process groups."""
