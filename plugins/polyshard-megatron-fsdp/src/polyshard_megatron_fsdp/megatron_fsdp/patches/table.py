"""All patches of megatron-fsdp.

``docs/reference/megatron-fsdp-patches.md`` shows them; tests check that the page agrees, and that
the test that each patch names exists.
"""

from polyshard_megatron_fsdp.megatron_fsdp.patches.cuda_shim import SHIM_PATCHES
from polyshard_megatron_fsdp.megatron_fsdp.patches.model import MODEL_PATCHES
from polyshard_megatron_fsdp.megatron_fsdp.patches.modules import MODULE_PATCHES
from polyshard_megatron_fsdp.megatron_fsdp.patches.optimizer import OPTIMIZER_PATCHES
from polyshard_megatron_fsdp.megatron_fsdp.patches.patched_model import CLASS_PATCHES

__all__ = ["PATCHES"]

PATCHES = (*SHIM_PATCHES, *MODULE_PATCHES, *MODEL_PATCHES, *CLASS_PATCHES, *OPTIMIZER_PATCHES)
