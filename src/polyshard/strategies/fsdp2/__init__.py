"""FSDP2: parameters, gradients and optimizer state sharded by torch's ``fully_shard``."""
