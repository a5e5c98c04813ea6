"""Loading a state dict into a wrapped model, of full tensors or of shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import RebuildError
from polyshard_megatron_fsdp.megatron_fsdp.private_names import has_original, local_of
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO
from polyshard_megatron_fsdp.model.layout import is_laid_out_like, part_of, shard_dims
from polyshard_megatron_fsdp.model.sharded_model import ShardedModel, lost_layout

__all__ = ["accept_full_tensors", "shard_like"]


def accept_full_tensors(model: ShardedModel) -> None:
    """Let ``load_state_dict`` of the model, and of each module in it, take full tensors too."""
    # The module's hooks must not keep the model alive that holds the module.
    owner = ref(model)

    def before(
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        current = owner()
        if current is not None:
            current.show_distributed()
            _refuse_assignment(current, metadata)
            if current.record.snapshot is not None:
                # A cast may just have taken the layout from the parameters.
                for remembered in current.record.snapshot.remembered:
                    remembered.restore_attributes()
            _shard_values(module, state, prefix)

    def after(*_: Any) -> None:
        current = owner()
        if current is not None and current.record.snapshot is None:
            # What was gathered before has the old values.
            current.synchronize_param_gather()

    for module in model.module.modules():
        module.register_load_state_dict_pre_hook(before)
    model.module.register_load_state_dict_post_hook(after)


def shard_like(full: Tensor, parameter: DTensor) -> DTensor:
    """Return this rank's part of a full tensor, placed like a parameter of the same shape."""
    return DTensor.from_local(
        part_of(full.detach(), parameter).to(parameter.device, copy=True),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _refuse_assignment(model: ShardedModel, metadata: Mapping[str, Any]) -> None:
    """Refuse to let parameters be replaced where nobody puts them back.

    Raises:
        RebuildError: ``assign=True`` outside ``rebuild``.
    """
    if metadata.get("assign_to_params_buffers") and model.record.snapshot is None:
        raise RebuildError(
            f"{WHO}: load_state_dict(assign=True) replaces "
            "parameters, which a model under Megatron-FSDP would go on without; put it inside "
            "polyshard.rebuild(model), or load without assign"
        )


def _shard_values(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
            continue
        if value.shape != parameter.shape:
            continue
        if not isinstance(value, DTensor):
            if not has_original(parameter):
                raise lost_layout(prefix + name)
            state[prefix + name] = shard_like(value, parameter)
        elif value is parameter and shard_dims(parameter):
            raise _wrong_layout(prefix + name, "the parameter itself, with parts copied into it")
        elif not is_laid_out_like(value, parameter):
            raise _wrong_layout(
                prefix + name,
                f"a DTensor of {list(local_of(value).shape)} where this rank holds "
                f"{list(local_of(parameter).shape)}",
            )


def _wrong_layout(name: str, found: str) -> RebuildError:
    return RebuildError(
        f"{WHO}: expected {name!r} laid out as Megatron-FSDP has it, or a full tensor, found "
        f"{found}, as torch's set_model_state_dict makes of a full state dict; call "
        "load_state_dict with the full tensors, on every rank, or "
        "polyshard.load_full_state_dict with those that the first rank has"
    )
