"""The optimizer of a wrapped model, and the gradients that it steps with."""
