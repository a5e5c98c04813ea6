"""What strategies share that changes how a model computes."""
