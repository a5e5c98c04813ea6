"""Every patch of megatron-fsdp; ``table.PATCHES`` lists them."""
