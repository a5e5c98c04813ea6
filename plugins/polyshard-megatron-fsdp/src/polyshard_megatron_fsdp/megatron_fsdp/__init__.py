"""All that touches the third-party package megatron-fsdp: its version, its names, its patches."""
