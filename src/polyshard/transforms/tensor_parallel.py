"""Tensor parallelism: single modules split over the ranks of the mesh dimension ``tp``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from polyshard.exceptions import ConfigError, MeshError, ModelError
from polyshard.parameters.slots import ParameterSlot, slots_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TensorParallelConfig", "apply_plan", "module_plan"]

#: Names that Hugging Face models use in their own plans, and ours for the same.
_ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "embedding_rowwise"}


class TensorParallelConfig(Protocol):
    """The fields of a config that say how modules are split; errors name its class."""

    @property
    def tp_plan(self) -> Mapping[str, Any] | None: ...  # noqa: D102

    @property
    def sequence_parallel(self) -> bool: ...  # noqa: D102


def module_plan(
    config: TensorParallelConfig, model: nn.Module, mesh: DeviceMesh | None
) -> dict[str, ParallelStyle]:
    """Return how each module is split: the config's plan, or else the model's own (``_tp_plan``).

    Args:
        config: With ``tp_plan`` and ``sequence_parallel``.
        model: The model before it is wrapped.
        mesh: The tensor-parallel dimension; None if there is none.

    Raises:
        MeshError: There is a plan and no mesh dimension, or the other way round.
        ConfigError: An entry of the plan matches no module, or the plan does not fit
            ``sequence_parallel``.
    """
    if mesh is None:
        asked = [name for name in ("tp_plan", "sequence_parallel") if getattr(config, name)]
        if asked:
            raise MeshError(
                f"{_name(config)}.{asked[0]}: expected a mesh dimension 'tp' of more than one "
                f"rank, found none; set tp_size, or leave {' and '.join(asked)} out"
            )
        return {}
    entries = (
        _matched(config, config.tp_plan, model) if config.tp_plan else _own_plan(config, model)
    )
    if config.sequence_parallel:
        _check_sequence_parallel(config, entries, model)
    return {
        name: style if isinstance(style, ParallelStyle) else _style(name, style, config)
        for name, style in entries.items()
    }


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Split the modules in place; tied parameters stay tied.

    Raises:
        ModelError: The plan splits the ends of a tie differently.
    """
    ties = [places for places in slots_of(model).values() if len(places) > 1]
    parallelize_module(model, mesh, dict(plan))
    for places in ties:
        _tie_again(places)


def _own_plan(config: TensorParallelConfig, model: nn.Module) -> dict[str, Any]:
    plan = getattr(model, "_tp_plan", None) or {}
    entries = _matched(config, plan, model, strict=False)
    if not entries:
        raise ConfigError(
            f"{_name(config)}.tp_plan: expected a plan for the mesh dimension 'tp', since "
            f"{type(model).__name__} has none of its own; map module names to styles, such as "
            "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}",
            field="tp_plan",
        )
    return entries


def _matched(
    config: TensorParallelConfig, plan: Mapping[str, Any], model: nn.Module, *, strict: bool = True
) -> dict[str, Any]:
    """Return the style of every module that an entry matches; ``*`` is one part of a name."""
    names = [name for name, _ in model.named_modules()]
    entries: dict[str, Any] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        matching = [name for name in names if expression.fullmatch(name)]
        if strict and not matching:
            raise ConfigError(
                f"{_name(config)}.tp_plan: expected names of modules of {type(model).__name__}, "
                f"found {pattern!r}, which matches none of {', '.join(names[1:]) or 'its modules'}",
                field="tp_plan",
            )
        entries |= dict.fromkeys(matching, style)
    return entries


def _style(name: str, style: str, config: TensorParallelConfig) -> ParallelStyle:
    """Return torch's style for one of ours; activations are whole, or shared along dimension 1."""
    between = Shard(1) if config.sequence_parallel else Replicate()
    styles: dict[str, Callable[[], ParallelStyle]] = {
        # What was gathered in front of a module around it is a DTensor, whose layout is known.
        "colwise": lambda: ColwiseParallel(input_layouts=between),
        "colwise_gather_output": lambda: ColwiseParallel(
            input_layouts=between, output_layouts=Replicate()
        ),
        "rowwise": lambda: RowwiseParallel(output_layouts=between),
        "embedding_rowwise": lambda: RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        ),
        "sequence_parallel": lambda: SequenceParallel(),
        "gather_sequence": lambda: PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
    }
    known = _ALIASES.get(style, style)
    if known not in styles:
        raise ConfigError(
            f"{_name(config)}.tp_plan: expected one of {', '.join(styles)} for {name!r}, found "
            f"{style!r} in the model's own plan; write the plan in the config",
            field="tp_plan",
        )
    return styles[known]()


def _check_sequence_parallel(
    config: TensorParallelConfig, entries: Mapping[str, Any], model: nn.Module
) -> None:
    """Check that every parameter is one whose gradient is summed over the sequence.

    A rank sees its part of the sequence alone, except in modules that the plan splits or in
    front of which it gathers.
    """
    for name, module in model.named_modules():
        covered = name in entries or any(
            entries.get(parent) == "gather_sequence" for parent in _parents(name)
        )
        if not covered and any(True for _ in module.parameters(recurse=False)):
            raise ConfigError(
                f"{_name(config)}.sequence_parallel: expected every module with parameters in the "
                f"tp_plan, found {name!r} ({type(module).__name__}) outside of it, which would be "
                "trained on a part of the sequence; add it as 'sequence_parallel', or a module "
                "around it as 'gather_sequence'",
                field="sequence_parallel",
            )


def _name(config: TensorParallelConfig) -> str:
    return type(config).__name__


def _tie_again(places: list[ParameterSlot]) -> None:
    first, *others = (place.get() for place in places)
    for place, other in zip(places[1:], others, strict=True):
        if first is other or first is None or other is None:
            continue
        if _placements(first) != _placements(other):
            raise ModelError(
                f"tp_plan: expected {places[0].name!r} and {place.name!r}, which are "
                "tied, to be split alike, found "
                f"{_placements(first) or 'no split'} and {_placements(other) or 'no split'}; "
                "give both a style, such as 'embedding_rowwise' and 'colwise_gather_output'"
            )
        place.put(first)


def _placements(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.placements if isinstance(parameter, DTensor) else ()


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
