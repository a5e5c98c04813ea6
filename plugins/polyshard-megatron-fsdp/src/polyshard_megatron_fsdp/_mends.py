"""Where the wheel is wrong, and how it is made right: all that reaches inside it.

Each mend is known to be needed up to the version ``LAST_TESTED``; a later wheel is left as it
is. ``docs/explanation/megatron-fsdp-faults.md`` has the size of each fault and its test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from polyshard.parameters.gradient_hooks import weakly
from polyshard_megatron_fsdp._layout import original_of
from polyshard_megatron_fsdp._megatron import MegatronFSDP
from polyshard_megatron_fsdp._wheel import LAST_TESTED, require_wheel, warn_once

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["mend_model", "mend_modules", "run_module", "without_first_step"]

#: Whether the wheel's forward calls the module that it wraps, as it does from 0.6.0 on.
_CALLS_MODULE = require_wheel() >= Version("0.6.0")

_mended = False


def mend_modules() -> None:
    """Mend what is wrong in the wheel's modules, once per process; call it before a wrap."""
    global _mended
    if _mended:
        return
    _mended = True
    if not _is_known():
        return
    buffers: Any = import_module("megatron_fsdp.param_and_grad_buffer")
    buffers.using_tensor_parallel = _optional_tensor_dimension(buffers.using_tensor_parallel)
    buffers._get_fsdp_tensor_spec = _placed_on_all_dimensions(buffers._get_fsdp_tensor_spec)
    buffers.make_fsdp_dtensor = _shaped_as_local(buffers)


def mend_model(model: Any) -> None:
    """Mend what is wrong in a model that was just wrapped."""
    if _is_known():
        _scale_outer_gradients(model)
        _renew_gradient_views(model)
        _begin_each_backward(model)
        _mark_what_units_share(model)
        _let_go(model)


def _is_known() -> bool:
    version = require_wheel()
    if version > LAST_TESTED:
        warn_once(
            f"megatron-fsdp {version} is later than {LAST_TESTED}, the last that was tested; "
            "it is used as it is"
        )
    return version <= LAST_TESTED


def _optional_tensor_dimension(using_tensor_parallel: Any) -> Any:
    """Let a mesh do without a tensor-parallel dimension.

    The wheel wants one of size 1 for plain parameters, which would cost a process group per rank.
    """

    def using(dist_index: Any, is_expert_parallel: bool = False) -> bool:
        return dist_index.tp_dim is not None and using_tensor_parallel(
            dist_index, is_expert_parallel=is_expert_parallel
        )

    return using


def _placed_on_all_dimensions(get_spec: Any) -> Any:
    """Give unsharded parameters a placement for each dimension of their mesh.

    Under HSDP with stage 0 the mesh has two dimensions, and the wheel gives one placement.
    """

    def spec(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        mesh, placements = get_spec(*args, **kwargs)
        missing = mesh.ndim - len(placements)
        return mesh, [Replicate()] * missing + list(placements)

    return spec


def _shaped_as_local(buffers: Any) -> Any:
    """View a tensor-parallel parameter's part with its local, not its global, trailing shape.

    With a parameter split along another dimension than the first (RowwiseParallel) the wheel
    finds invalid chunks on some ranks, and the others hang. All ranks meet three times for each
    parameter to find such chunks, and to describe the right ones, which ``describe_parts`` does
    without: both are left out.
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
                buffers.to_local_if_dtensor(local_tensor).view(-1, *param._local_tensor.shape[1:]),
                mesh,
                placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        tensor: DTensor = make_fsdp_dtensor(local_tensor, param, dist_index, **kind, **others)
        return tensor

    return make


def _scale_outer_gradients(model: Any) -> None:
    """Give the buffers of an outer sharded dimension the factor that averages gradients.

    The wheel drops it, so that gradients are too large by the number of data-parallel ranks.
    """
    for group in model.param_and_grad_buffer.parameter_groups:
        helper = group.hfsdp_helper_gbuf
        if helper is not None and helper.gradient_scaling_factor is None:
            helper.gradient_scaling_factor = group.main_grad_buffer.gradient_scaling_factor


def _renew_gradient_views(model: Any) -> None:
    """Make gradients of tensor-parallel parameters anew, where the local shape is right.

    From the second step on the wheel views them with the global trailing shape.
    """
    buffer = model.param_and_grad_buffer
    if not any(isinstance(parameter, DTensor) for parameter in buffer.params):
        return
    update_main_grads = buffer.update_main_grads

    def update() -> None:
        buffer.dist_main_grad.clear()
        update_main_grads()

    buffer.update_main_grads = update


def _begin_each_backward(model: Any) -> None:
    """Let the first gradient of a backward tell the wheel that there is one.

    The wheel waits for the gradient of an output that is a tensor or a tuple of tensors. Of a dict,
    say, it hears only when the backward comes to the module that was registered last, and forgets
    the gradients from before.
    """
    begin = model.pre_backward.func

    def before_gradient(_: Tensor) -> None:
        if not model._root_pre_backward_hook_issued:
            begin(model.module)

    for parameter in model.param_and_grad_buffer.params:
        if parameter.requires_grad:
            parameter.register_hook(before_gradient)


def _mark_what_units_share(model: Any) -> None:
    """Let the gradients of a module that several units share wait for the end of a backward.

    The wheel marks parameters that are shared between modules, not those of a module that is itself
    shared: each of its units takes the gradient, and the second finds none and puts zeros there.
    """
    kinds: Any = tuple(model.fsdp_unit_modules)
    units = [module for module in model.module.modules() if isinstance(module, kinds)]
    owners = Counter(parameter for unit in units for parameter in unit.parameters())
    for parameter, count in owners.items():
        if count > 1:
            original_of(parameter)._is_shared = True  # type: ignore[attr-defined]


def _let_go(model: Any) -> None:
    """Let a model be freed once the script has dropped it.

    The wheel's hooks on gradients refer to the model, and torch keeps such hooks where Python's
    garbage collector does not look. So the model alone holds them.
    """
    model.hooks_on_gradients = held = []
    for parameter in model.param_and_grad_buffer.params:
        hooks = parameter._post_accumulate_grad_hooks or {}
        for key, hook in hooks.items():
            held.append(hook)
            hooks[key] = weakly(hook)


def run_module(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module that a model wraps.

    Before 0.6.0 the wheel calls the module's ``forward``, past the hooks of the module: those of a
    script, and its own, which gathers what the module itself owns and begins the backward.
    """
    if _CALLS_MODULE:
        return MegatronFSDP.forward(model, *args, **kwargs)
    model._replace_param_with_raw_if_needed()
    return model.module(*args, **kwargs)


@contextmanager
def without_first_step(optimizer: Optimizer) -> Iterator[None]:
    """Keep ``fully_shard_optimizer`` from taking a step with zero gradients.

    That step decays weights, and counts. The wheel takes the step that it extends from the type,
    so that the instance's may do nothing for as long as this lasts.
    """
    optimizer.step = _no_step  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if optimizer.__dict__.get("step") is _no_step:
            del optimizer.step


def _no_step(*_: Any, **__: Any) -> None:
    """Take no step."""
