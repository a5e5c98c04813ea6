"""Patches of a model that megatron-fsdp has just wrapped."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard.parameters.gradient_hooks import weakly
from polyshard_megatron_fsdp.megatron_fsdp.patches.patch import ALL, TESTED, Patch
from polyshard_megatron_fsdp.megatron_fsdp.private_names import (
    begin_backward,
    gradient_hooks,
    managed_parameters,
    mark_as_shared,
    original_of,
    parameter_groups,
)

__all__ = ["MODEL_PATCHES", "patch_model"]


def patch_model(model: Any) -> None:
    """Fix what is wrong in a model that was just wrapped."""
    for patch in MODEL_PATCHES:
        if patch.is_needed:
            patch.apply(model)


def _divide_before_reducing(model: Any) -> None:
    if model.device.type != "cuda":
        model.ddp_config.gradient_reduce_div_fusion = False


def _scale_outer_gradients(model: Any) -> None:
    for group in parameter_groups(model):
        helper = group.hfsdp_helper_gbuf
        if helper is not None and helper.gradient_scaling_factor is None:
            helper.gradient_scaling_factor = group.main_grad_buffer.gradient_scaling_factor


def _renew_gradient_views(model: Any) -> None:
    """Make gradients of tensor-parallel parameters anew, which gives them the local shape."""
    if not any(isinstance(parameter, DTensor) for parameter in managed_parameters(model)):
        return
    buffer = model.param_and_grad_buffer
    update_main_grads = buffer.update_main_grads

    def update() -> None:
        buffer.dist_main_grad.clear()
        update_main_grads()

    buffer.update_main_grads = update


def _begin_each_backward(model: Any) -> None:
    """Let the first gradient of a backward say that there is one."""

    def before_gradient(_: Tensor) -> None:
        begin_backward(model)

    for parameter in managed_parameters(model):
        if parameter.requires_grad:
            parameter.register_hook(before_gradient)


def _mark_what_units_share(model: Any) -> None:
    """Let gradients of a module that several units share wait for the end of a backward."""
    kinds: Any = tuple(model.fsdp_unit_modules)
    units = [module for module in model.module.modules() if isinstance(module, kinds)]
    owners = Counter(parameter for unit in units for parameter in unit.parameters())
    for parameter, count in owners.items():
        if count > 1:
            mark_as_shared(original_of(parameter))


def _let_go(model: Any) -> None:
    """Let the model alone hold its hooks on gradients."""
    model.hooks_on_gradients = held = []
    for parameter in managed_parameters(model):
        hooks = gradient_hooks(parameter)
        for key, hook in hooks.items():
            held.append(hook)
            hooks[key] = weakly(hook)


MODEL_PATCHES = (
    Patch(
        name="scale-of-outer-gradients",
        problem="HSDP with a sharded outer dimension: the buffer that reduces over it drops the "
        "scaling factor; gradients are too large by the number of data-parallel ranks",
        versions=TESTED,
        test="megatron_fsdp/test_faults.py::test_fault_is_there_on_four_ranks"
        "[gradients of sharded replicas are 4 times too large]",
        apply=_scale_outer_gradients,
    ),
    Patch(
        name="gradient-views",
        problem="row-wise tensor parallelism: gradients have the global trailing shape from the "
        "second step on",
        versions=TESTED,
        test="megatron_fsdp/test_patches.py::test_second_step_of_rowwise_modules_is_wrong",
        apply=_renew_gradient_views,
    ),
    Patch(
        name="begin-of-backward",
        problem="a backward is noticed by the gradient of an output that is a tensor or a tuple of "
        "tensors; with a dict, say, gradients before the module registered last are lost",
        versions=TESTED,
        test="megatron_fsdp/test_faults.py::test_fault_is_there"
        "[gradients are lost unless the output is a tensor]",
        apply=_begin_each_backward,
    ),
    Patch(
        name="module-of-two-units",
        problem="parameters shared between modules are marked, those of a shared module are not: "
        "each of its units takes the gradient, and the second puts zeros there",
        versions=TESTED,
        test="megatron_fsdp/test_faults.py::test_fault_is_there"
        "[gradients of a module that two units share are lost]",
        apply=_mark_what_units_share,
    ),
    Patch(
        name="weak-gradient-hooks",
        problem="hooks on gradients refer to the model, and torch keeps them where Python's "
        "garbage collector does not look: a wrapped model is never freed",
        versions=TESTED,
        test="megatron_fsdp/test_faults.py::test_fault_is_there[a model is never freed]",
        apply=_let_go,
    ),
    Patch(
        name="division-before-reduction",
        problem="gradients are scaled by the reduction itself, which gloo cannot; not on CUDA",
        versions=ALL,
        test="megatron_fsdp/test_patches.py::test_gloo_cannot_scale",
        apply=_divide_before_reducing,
    ),
)
