"""megatron-fsdp's model with the methods that are wrong in it replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyshard.parameters.slots import slots_of
from polyshard_megatron_fsdp.megatron_fsdp.patches.patch import ALL, Patch
from polyshard_megatron_fsdp.megatron_fsdp.private_names import show_distributed, show_raw
from polyshard_megatron_fsdp.megatron_fsdp.upstream import MegatronFSDP

__all__ = ["CLASS_PATCHES", "PatchedModel"]


class PatchedModel(MegatronFSDP):  # type: ignore[misc]  # It is not typed.
    """A ``MegatronFSDP`` that is right where the original is not."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; without gradients the parameters are back in place afterwards."""
        output = _run(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            # No backward will put them back, and the raw ones may have no storage.
            show_distributed(self)
        return output

    def _reestablish_shared_weights(
        self, old_params: dict[str, nn.Parameter], new_params: dict[str, nn.Parameter]
    ) -> None:
        """Put a tied parameter in all its places."""
        super()._reestablish_shared_weights(old_params, new_params)
        new = {old: new_params[name] for name, old in old_params.items() if name in new_params}
        for parameter, slots in slots_of(self.module).items():
            if parameter in new:
                for slot in slots:
                    slot.put(new[parameter])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those in the buffers too."""
        super().zero_grad(set_to_none)
        self.zero_grad_buffer()

    def synchronize_param_gather(self) -> None:
        """Forget what was gathered, and put the distributed parameters in place."""
        pipeline = self.all_gather_pipeline
        while pipeline.param_gather_event_map:
            pipeline.wait_bucket_ready(*next(iter(pipeline.param_gather_event_map)))
        super().synchronize_param_gather()


def _call_module(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module, where megatron-fsdp calls its ``forward``, past the module's hooks."""
    show_raw(model)
    return model.module(*args, **kwargs)


_CALL = Patch(
    name="call-the-module",
    problem="the module's `forward` is called, past its hooks: those of a script, and "
    "megatron-fsdp's own, which gathers what the module itself owns and begins the backward",
    versions="<0.6.0",
    test="megatron_fsdp/test_faults.py::test_fault_is_there"
    "[gradients are lost unless the last module is used last]",
    apply=_call_module,
)
_run = _CALL.apply if _CALL.is_needed else MegatronFSDP.forward

CLASS_PATCHES = (
    _CALL,
    Patch(
        name="parameters-after-evaluation",
        problem="after a forward without gradients the model shows the parameters that it computes "
        "with, which may have no storage: reading one ends the process on the CPU",
        versions=ALL,
        test="megatron_fsdp/test_faults.py::test_fault_is_there"
        "[raw parameters show after an evaluation]",
        apply=PatchedModel.forward,
    ),
    Patch(
        name="ties-of-three",
        problem="where parameters are exchanged, the third and later places of a tied one are left "
        "out",
        versions=ALL,
        test="megatron_fsdp/test_patches.py::test_third_place_of_a_tie_is_left_out",
        apply=PatchedModel._reestablish_shared_weights,
    ),
    Patch(
        name="zeroed-buffers",
        problem="`model.zero_grad()` leaves gradients in the buffers, and the next backward adds "
        "to them",
        versions=ALL,
        test="megatron_fsdp/test_patches.py::test_zero_grad_leaves_gradients",
        apply=PatchedModel.zero_grad,
    ),
    Patch(
        name="gathers-left-behind",
        problem="gathers that a step leaves behind, as prefetching a frozen part of the model "
        "does, are a warning in every step",
        versions=ALL,
        test="megatron_fsdp/test_patches.py::test_frozen_part_warns",
        apply=PatchedModel.synchronize_param_gather,
    ),
)
