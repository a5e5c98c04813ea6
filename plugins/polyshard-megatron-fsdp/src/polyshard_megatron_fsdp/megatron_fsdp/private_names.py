"""Every private name of torch and of megatron-fsdp that this plugin uses.

All other modules reach them through the functions here, so that a release that renames one fails in
one place. ``FUNCTIONS`` and ``ATTRIBUTES`` list them; a test checks that each exists, and that each
function takes what it is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "ATTRIBUTES",
    "FUNCTIONS",
    "MODULES_WITH_TORCH",
    "PrivateFunction",
    "begin_backward",
    "buffers_module",
    "compute_local_shape_and_global_offset",
    "concatenate",
    "describe_for_checkpoints",
    "distributed_parameters",
    "flatten",
    "gathered_whole",
    "gradient_hooks",
    "has_original",
    "local_of",
    "managed_parameters",
    "mark_as_shared",
    "model_of",
    "modules_with_torch",
    "original_of",
    "parameter_groups",
    "restore_ties",
    "set_model_of",
    "show_distributed",
    "show_raw",
    "slice_of",
    "times_written",
    "weights",
]


@frozen
class PrivateFunction:
    """A private function or method, and how it is called.

    Attributes:
        owner: Its module, or module and class, as ``package.module:Class``.
        name: Its name there.
        positional: How many positional arguments it gets, ``self`` not counted.
        keywords: The names of its keyword arguments.
    """

    owner: str
    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()


_BUFFERS = "megatron_fsdp.param_and_grad_buffer"
_MODEL = "megatron_fsdp.megatron_fsdp:MegatronFSDP"

FUNCTIONS = (
    PrivateFunction("torch.distributed.device_mesh:DeviceMesh", "_flatten", 1),
    PrivateFunction("torch.distributed.device_mesh:DeviceMesh", "_concatenate", 1),
    PrivateFunction("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", 3),
    PrivateFunction(_MODEL, "_replace_param_with_raw_if_needed"),
    PrivateFunction(_MODEL, "_replace_param_with_distributed_if_needed"),
    PrivateFunction(_MODEL, "_reestablish_shared_weights", 2),
    PrivateFunction(_MODEL, "install_optimized_model_weights"),
    PrivateFunction(_MODEL, "finish_grad_sync", 1),
    PrivateFunction(_MODEL, "synchronize_param_gather"),
    PrivateFunction(_MODEL, "zero_grad_buffer"),
    PrivateFunction(_MODEL, "all_gather_and_wait_parameters_ready", 1, ("prefetch",)),
    PrivateFunction(f"{_BUFFERS}:AllGatherPipeline", "wait_bucket_ready", 2),
    PrivateFunction(f"{_BUFFERS}:AllGatherPipeline", "release_bucket", 2),
    PrivateFunction(f"{_BUFFERS}:ParamAndGradBuffer", "update_main_grads"),
    PrivateFunction("megatron_fsdp.utils:FSDPDistributedIndex", "get_dp_group"),
    PrivateFunction(_BUFFERS, "_coalescing_manager", 1, ("async_ops",)),
    PrivateFunction(_BUFFERS, "using_tensor_parallel", 1, ("is_expert_parallel",)),
    PrivateFunction(_BUFFERS, "_get_fsdp_tensor_spec", 2, ("is_sharded_param", "is_expert_param")),
    PrivateFunction(_BUFFERS, "make_fsdp_dtensor", 3, ("is_sharded_param", "is_expert_param")),
    PrivateFunction(_BUFFERS, "to_local_if_dtensor", 1),
)

#: Attributes that come with a wrapped model, as paths from it; ``[0]`` is the first of several.
#: ``distributed`` and ``original`` are a parameter that an optimizer steps, and the one that the
#: model computes with in its place.
ATTRIBUTES = (
    "model.all_gather_pipeline.param_gather_event_map",
    "model.ddp_config.fsdp_double_buffer",
    "model.ddp_config.gradient_reduce_div_fusion",
    "model.device",
    "model.dist_index.tp_dim",
    "model.fsdp_unit_modules",
    "model.is_param_fsdp_distributed",
    "model.model_auto_sync",
    "model.module._training_state.IDLE",
    "model.param_and_grad_buffer.dist_main_grad",
    "model.param_and_grad_buffer.optimizer_named_parameters",
    "model.param_and_grad_buffer.parameter_groups[0].fsdp_unit_id",
    "model.param_and_grad_buffer.parameter_groups[0].hfsdp_helper_gbuf",
    "model.param_and_grad_buffer.parameter_groups[0].hfsdp_helper_wbuf",
    "model.param_and_grad_buffer.parameter_groups[0].main_grad_buffer.gradient_scaling_factor",
    "model.param_and_grad_buffer.parameter_groups[0].main_weight_buffer",
    "model.param_and_grad_buffer.parameter_groups[0].model_weight_buffer.data",
    "model.param_and_grad_buffer.params",
    "model.pre_backward.func",
    "model.raw_param",
    "model._root_pre_backward_hook_issued",
    "distributed._local_tensor",
    "distributed._megatron_fsdp_model",
    "distributed._version",
    "distributed.megatron_fsdp_slice",
    "distributed.orig_param",
    "original._post_accumulate_grad_hooks",
)

#: The modules of megatron-fsdp that use ``torch.cuda`` by their own name ``torch``.
MODULES_WITH_TORCH = (
    "fully_shard",
    "megatron_fsdp",
    "mixed_precision",
    "param_and_grad_buffer",
    "uneven_dtensor",
    "utils",
)


# torch


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank; ``to_local()`` would be another object."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def times_written(tensor: Tensor) -> int:
    """Return how often a tensor has been written to in place."""
    return tensor._version


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Make one dimension of all dimensions of a mesh."""
    return mesh._flatten(name)


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Make one mesh of submeshes of the same one, in the order given."""
    return DeviceMesh._concatenate(meshes)


def gradient_hooks(parameter: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """Return the hooks that run once the gradient is accumulated, to change; torch has no list."""
    hooks: dict[int, Callable[[Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def describe_for_checkpoints(
    local: Any, chunks: Callable[[], object], write_items: Callable[..., object]
) -> None:
    """Set what ``torch.distributed.checkpoint`` asks a tensor for that is not evenly sharded."""
    local.__create_chunk_list__ = chunks
    local.__create_write_items__ = write_items


# megatron-fsdp


def buffers_module() -> Any:
    """Return the module that cuts parameters, gathers them and reduces gradients."""
    return import_module(_BUFFERS)


def modules_with_torch() -> list[ModuleType]:
    """Return the modules that use ``torch.cuda`` by their own name ``torch``."""
    return [import_module(f"megatron_fsdp.{name}") for name in MODULES_WITH_TORCH]


def show_raw(model: Any) -> None:
    """Let a wrapped model hold the parameters that it computes with."""
    model._replace_param_with_raw_if_needed()


def show_distributed(model: Any) -> None:
    """Let a wrapped model hold the parameters that optimizers step."""
    model._replace_param_with_distributed_if_needed()


def restore_ties(model: Any) -> None:
    """Put the tied parameters that optimizers step in all their places in a wrapped model."""
    model._reestablish_shared_weights(model.raw_param, dict(distributed_parameters(model)))


def distributed_parameters(model: Any) -> list[tuple[str, Any]]:
    """Return the parameters that optimizers step, with their names in the wrapped module."""
    named: list[tuple[str, Any]] = model.param_and_grad_buffer.optimizer_named_parameters
    return named


def managed_parameters(model: Any) -> list[Any]:
    """Return the parameters that a wrapped model computes with."""
    return list(model.param_and_grad_buffer.params)


def parameter_groups(model: Any) -> list[Any]:
    """Return the groups of parameters that share buffers."""
    return list(model.param_and_grad_buffer.parameter_groups)


def weights(model: Any) -> list[Tensor]:
    """Return every tensor that backs weights: what the model computes with, what is stepped."""
    buffers = (
        buffer
        for group in parameter_groups(model)
        for buffer in (
            group.model_weight_buffer,
            group.main_weight_buffer,
            group.hfsdp_helper_wbuf,
        )
    )
    held = [b.data for b in buffers if b is not None and b.data is not None]
    return [*held, *(local_of(parameter) for parameter in model.raw_param.values())]


def begin_backward(model: Any) -> None:
    """Tell a wrapped model that a backward begins, unless it knows."""
    if not model._root_pre_backward_hook_issued:
        model.pre_backward.func(model.module)


@contextmanager
def gathered_whole(model: Any) -> Iterator[None]:
    """Gather all that a wrapped model computes with, and release its units at the end alone.

    Until then a forward finds everything gathered, and meets no other rank.
    """
    pipeline = model.all_gather_pipeline
    model.all_gather_and_wait_parameters_ready(managed_parameters(model), prefetch=False)
    pipeline.release_bucket = _release_nothing
    try:
        yield
    finally:
        del pipeline.release_bucket
        for bucket, group in enumerate(parameter_groups(model)):
            if group.fsdp_unit_id is not None:
                pipeline.release_bucket(bucket, False)
        for module in model.module.modules():
            # A forward that raised has left its modules in another state.
            module._training_state = module._training_state.IDLE


def _release_nothing(*_: Any, **__: Any) -> None:
    """Keep a bucket gathered."""


def original_of(parameter: Tensor) -> Tensor:
    """Return the parameter that the model computes with in place of a distributed one."""
    original: Tensor = parameter.orig_param  # type: ignore[attr-defined]
    return original


def has_original(parameter: Tensor) -> bool:
    """Tell whether a distributed parameter has its attributes; a cast takes them away."""
    return "orig_param" in parameter.__dict__


def slice_of(parameter: Tensor) -> slice:
    """Return this rank's part of a flattened parameter; stages that shard nothing have none."""
    part: slice = parameter.megatron_fsdp_slice  # type: ignore[attr-defined]
    return part


def model_of(parameter: object) -> Any:
    """Return the wrapped model that manages a parameter, None if none does."""
    return getattr(parameter, "_megatron_fsdp_model", None)


def set_model_of(parameter: Tensor, model: Any) -> None:
    """Note on a parameter which wrapped model manages it."""
    parameter.__dict__["_megatron_fsdp_model"] = model


def mark_as_shared(parameter: Any) -> None:
    """Let the gradient of a parameter wait for the end of the backward."""
    parameter._is_shared = True
