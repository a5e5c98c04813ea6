"""The public names of megatron-fsdp; it is imported here."""

from __future__ import annotations

import warnings
from typing import Any

# megatron-fsdp is typed in part; what is used of it is described where it is used.
MegatronFSDP: Any
MixedPrecisionPolicy: Any
fully_shard_model: Any
fully_shard_optimizer: Any

with warnings.catch_warnings():
    # Nothing here needs Transformer Engine; megatron-fsdp warns at import that it is not installed.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    from megatron_fsdp import (
        MegatronFSDP,
        MixedPrecisionPolicy,
        fully_shard_model,
        fully_shard_optimizer,
    )

__all__ = ["MegatronFSDP", "MixedPrecisionPolicy", "fully_shard_model", "fully_shard_optimizer"]
