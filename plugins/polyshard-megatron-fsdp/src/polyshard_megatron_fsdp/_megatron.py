"""The one place where the wheel is imported."""

from __future__ import annotations

import warnings
from typing import Any

# The wheel is typed in part; what is used of it is described where it is used.
MegatronFSDP: Any
MixedPrecisionPolicy: Any
fully_shard_model: Any
fully_shard_optimizer: Any

with warnings.catch_warnings():
    # Nothing here needs Transformer Engine; the wheel says at import that it is not installed.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    from megatron_fsdp import (
        MegatronFSDP,
        MixedPrecisionPolicy,
        fully_shard_model,
        fully_shard_optimizer,
    )

__all__ = ["MegatronFSDP", "MixedPrecisionPolicy", "fully_shard_model", "fully_shard_optimizer"]
