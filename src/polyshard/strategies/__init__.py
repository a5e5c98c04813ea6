"""The strategies that the core distribution ships; each is announced by entry point."""
