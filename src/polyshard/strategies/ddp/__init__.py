"""DistributedDataParallel: every rank holds the whole model and gradients are averaged."""
