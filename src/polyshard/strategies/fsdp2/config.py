"""FSDP2Config, and how offloading is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from attrs import Attribute, evolve, field, frozen

from polyshard.config.base import DistributedConfig
from polyshard.config.fields import (
    accepts,
    is_bool,
    is_instance,
    is_int,
    is_one_of,
    optional,
    reject,
    to_dtype_name,
)
from polyshard.config.precision import MixedPrecision
from polyshard.config.structuring import structure
from polyshard.exceptions import ConfigError

__all__ = ["TENSOR_PARALLEL_STYLES", "CPUOffload", "FSDP2Config"]

#: The styles that a ``tp_plan`` may name; ``tensor_parallel`` knows what they do.
TENSOR_PARALLEL_STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "embedding_rowwise",
    "sequence_parallel",
    "gather_sequence",
)


@frozen(kw_only=True)
class CPUOffload:
    """Keep shards of parameters, gradients and optimizer state in host memory.

    Attributes:
        pin_memory: Whether that memory is pinned, which makes the copies faster.
    """

    pin_memory: bool = field(default=True, validator=is_bool)


def _to_mixed_precision(value: object) -> object:
    """Accept a mapping and torch's ``MixedPrecisionPolicy`` in place of ``MixedPrecision``."""
    if isinstance(value, Mapping):
        return structure(value, MixedPrecision, path=("mp_policy",))
    if _is_torch(value, "MixedPrecisionPolicy"):
        return MixedPrecision(**{name: getattr(value, name) for name in _POLICY_FIELDS})
    return value


def _to_offload(value: object) -> object:
    """Accept a mapping and torch's offload policies in place of ``CPUOffload``."""
    if isinstance(value, Mapping):
        return structure(value, CPUOffload, path=("offload_policy",))
    if _is_torch(value, "CPUOffloadPolicy"):
        return CPUOffload(pin_memory=value.pin_memory)  # type: ignore[attr-defined]
    return None if _is_torch(value, "OffloadPolicy") else value


_CLASS_NAME = {"type": "string", "minLength": 1}
_POLICY_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def _is_torch(value: object, name: str) -> bool:
    return type(value).__name__ == name and type(value).__module__.startswith("torch.")


@accepts({"anyOf": [_CLASS_NAME, {"type": "array", "items": _CLASS_NAME, "minItems": 1}]})
def _is_unit_list(instance: object, attribute: Attribute[Any], value: object) -> None:
    entries = value if isinstance(value, tuple) else ()
    if not entries or not all(isinstance(e, type) or (isinstance(e, str) and e) for e in entries):
        reject(instance, attribute, value, "module classes or their names")


def _to_tuple(value: object) -> object:
    if isinstance(value, str | type):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


@accepts(
    {
        "type": "object",
        "additionalProperties": {"enum": TENSOR_PARALLEL_STYLES},
        "minProperties": 1,
    }
)
def _is_plan(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping) or not value:
        reject(instance, attribute, value, "a mapping of module names to styles")
    for name, style in value.items():
        if not isinstance(name, str) or not (
            style in TENSOR_PARALLEL_STYLES if isinstance(style, str) else _is_parallel_style(style)
        ):
            expected = (
                f"for {name!r} one of {', '.join(TENSOR_PARALLEL_STYLES)} or a torch ParallelStyle"
            )
            reject(instance, attribute, style, expected)


def _is_parallel_style(value: object) -> bool:
    return any(
        cls.__name__ == "ParallelStyle" and cls.__module__.startswith("torch.")
        for cls in type(value).__mro__
    )


@accepts({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 2}]})
def _is_reshard(instance: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or (value < 2 and not isinstance(value, bool)):
        reject(instance, attribute, value, "true, false, or a number of at least 2 ranks")


@frozen(kw_only=True)
class FSDP2Config(DistributedConfig):
    """How torch's ``fully_shard`` trains the model.

    Each unit, usually a repeated block, is gathered for its forward and backward and sharded
    otherwise; what belongs to no unit forms one more group.

    Attributes:
        unit_modules: Classes of the modules that are units, or their names; None finds them in
            the model.
        sync_initial_weights: Whether all ranks start with the weights and buffers of the first
            one. Without it each rank contributes its part of its own.
        tp_plan: Which modules are split over the mesh dimension ``tp``, and how: names (``*``
            stands for one part of a name) to ``"colwise"``, ``"rowwise"``,
            ``"colwise_gather_output"``, ``"embedding_rowwise"`` or a torch ``ParallelStyle``.
            None takes the model's own plan.
        sequence_parallel: Whether the tensor-parallel ranks share the sequence, dimension 1 of
            the activations, between the modules that are split. The plan then names the modules
            that compute on a part of it (``"sequence_parallel"``, such as norms) and those whose
            first input is gathered (``"gather_sequence"``, such as an attention).
        mp_policy: Dtypes of compute and reduction; None keeps the model's own.
        offload_policy: Keeps the shards in host memory; None keeps them on the device.
        autocast_dtype: Dtype of ``torch.autocast`` in the forward, bfloat16 or float16; None
            turns it off.
        activation_checkpointing: Whether each unit computes its activations again in backward:
            False, True or ``"full"``, or ``"selective"``, which keeps the results of matrix
            products and attention.
        reshard_after_forward: Whether a unit's parameters are freed between its forward and its
            backward; an int reshards them over that many ranks. None frees those of units and
            keeps the others.
        defer_fsdp_grad_sync: Whether gradients are reduced at the last microbatch only, which
            saves communication, rather than at each, which saves memory.
        reduce_scatter_unused_params: Whether parameters that a rank did not use take part in the
            reduction with zeros. It is needed where ranks use different ones, such as experts.
            What no rank used then has a gradient of zeros, and not None.
        forward_prefetch_depth: How many units are gathered ahead in forward; None leaves it to
            torch.
        backward_prefetch_depth: How many units are gathered ahead in backward; None leaves it to
            torch.
        enable_compile: Whether each unit is compiled with ``torch.compile``, or the whole model
            where there are none.
    """

    strategy: ClassVar[str] = "fsdp2"
    parallelism: ClassVar[frozenset[str]] = frozenset({"dp", "dp_replicate", "cp", "tp"})

    unit_modules: tuple[type | str, ...] | None = field(
        default=None, converter=_to_tuple, validator=optional(_is_unit_list)
    )
    sync_initial_weights: bool = field(default=True, validator=is_bool)
    tp_plan: Mapping[str, Any] | None = field(default=None, validator=optional(_is_plan))
    sequence_parallel: bool = field(default=False, validator=is_bool)
    mp_policy: MixedPrecision | None = field(
        factory=MixedPrecision,
        converter=_to_mixed_precision,
        validator=optional(is_instance(MixedPrecision)),
    )
    offload_policy: CPUOffload | None = field(
        default=None, converter=_to_offload, validator=optional(is_instance(CPUOffload))
    )
    autocast_dtype: str | None = field(
        default=None,
        converter=to_dtype_name,
        validator=optional(is_one_of("bfloat16", "float16")),
    )
    activation_checkpointing: bool | Literal["full", "selective"] = field(
        default=False, validator=is_one_of(False, True, "full", "selective")
    )
    reshard_after_forward: bool | int | None = field(default=None, validator=optional(_is_reshard))
    defer_fsdp_grad_sync: bool = field(default=True, validator=is_bool)
    reduce_scatter_unused_params: bool = field(default=False, validator=is_bool)
    forward_prefetch_depth: int | None = field(default=None, validator=optional(is_int(1)))
    backward_prefetch_depth: int | None = field(default=None, validator=optional(is_int(1)))
    enable_compile: bool = field(default=False, validator=is_bool)

    def __attrs_post_init__(self) -> None:
        styles = (self.tp_plan or {}).values()
        needing = [s for s in styles if s in ("sequence_parallel", "gather_sequence")]
        if needing and not self.sequence_parallel:
            raise ConfigError(
                f"FSDP2Config.tp_plan: expected sequence_parallel=True with the style "
                f"{needing[0]!r}, found False",
                field="tp_plan",
            )

    def in_full_precision(self) -> Self:
        """Return this config with the model's own dtype for everything."""
        return evolve(self, mp_policy=None, autocast_dtype=None)
