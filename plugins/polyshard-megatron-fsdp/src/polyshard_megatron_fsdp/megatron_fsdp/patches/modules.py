"""Patches of megatron-fsdp's modules: applied once per process, before the first wrap."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from polyshard_megatron_fsdp.megatron_fsdp.patches.patch import TESTED, Patch
from polyshard_megatron_fsdp.megatron_fsdp.private_names import buffers_module, local_of
from polyshard_megatron_fsdp.megatron_fsdp.version import warn_if_untested

__all__ = ["MODULE_PATCHES", "patch_modules"]


@cache
def patch_modules() -> None:
    """Fix what is wrong in the modules, once per process; call it before a wrap."""
    warn_if_untested()
    for patch in MODULE_PATCHES:
        if patch.is_needed:
            patch.apply(buffers_module())


def _let_tensor_dimension_be_missing(buffers: Any) -> None:
    using_tensor_parallel = buffers.using_tensor_parallel

    def using(dist_index: Any, is_expert_parallel: bool = False) -> bool:
        return dist_index.tp_dim is not None and using_tensor_parallel(
            dist_index, is_expert_parallel=is_expert_parallel
        )

    buffers.using_tensor_parallel = using


def _place_on_all_dimensions(buffers: Any) -> None:
    get_spec = buffers._get_fsdp_tensor_spec

    def spec(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        mesh, placements = get_spec(*args, **kwargs)
        missing = mesh.ndim - len(placements)
        return mesh, [Replicate()] * missing + list(placements)

    buffers._get_fsdp_tensor_spec = spec


def _shape_as_local(buffers: Any) -> None:
    """View a tensor-parallel parameter's part with its local trailing shape.

    Ranks meet three times for each parameter to find chunks of the other shape, and to describe the
    right ones, which ``describe_parts`` does without: both are left out.
    """
    make_fsdp_dtensor = buffers.make_fsdp_dtensor

    def make(
        local_tensor: Tensor,
        param: Tensor,
        dist_index: Any,
        is_sharded_param: bool = True,
        is_expert_param: bool = False,
        run_check: bool = False,
        update_uneven_dtensor_chunk_meta: bool = False,
        **others: Any,
    ) -> DTensor:
        kind = {"is_sharded_param": is_sharded_param, "is_expert_param": is_expert_param}
        if isinstance(param, DTensor):
            mesh, placements = buffers._get_fsdp_tensor_spec(param, dist_index, **kind)
            return DTensor.from_local(
                buffers.to_local_if_dtensor(local_tensor).view(-1, *local_of(param).shape[1:]),
                mesh,
                placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        tensor: DTensor = make_fsdp_dtensor(local_tensor, param, dist_index, **kind, **others)
        return tensor

    buffers.make_fsdp_dtensor = make


MODULE_PATCHES = (
    Patch(
        name="missing-tensor-dimension",
        problem="a mesh without a tensor-parallel dimension is refused, and one of size 1 costs a "
        "process group per rank",
        versions=TESTED,
        test="megatron_fsdp/test_patches.py::test_mesh_needs_a_tensor_dimension",
        apply=_let_tensor_dimension_be_missing,
    ),
    Patch(
        name="placement-per-dimension",
        problem="HSDP under stage 0: parameters have one placement for two mesh dimensions",
        versions=TESTED,
        test="megatron_fsdp/test_faults.py::test_fault_is_there_on_four_ranks"
        "[replicas cannot be trained under stage 0]",
        apply=_place_on_all_dimensions,
    ),
    Patch(
        name="local-trailing-shape",
        problem="row-wise tensor parallelism: parts are viewed with the global trailing shape; "
        "some ranks find invalid chunks, and the others hang",
        versions=TESTED,
        test="megatron_fsdp/test_loud_faults.py::test_rowwise_parallel_modules_fail",
        apply=_shape_as_local,
    ),
)
