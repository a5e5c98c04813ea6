"""What a training script calls, the same under every strategy."""
