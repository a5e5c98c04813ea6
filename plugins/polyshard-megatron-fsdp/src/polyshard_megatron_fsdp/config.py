"""MegatronFSDPConfig, the config class that names the strategy ``megatron_fsdp``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import Attribute, field, frozen

from polyshard.config.base import DistributedConfig
from polyshard.config.fields import accepts, is_bool, is_one_of, optional, reject
from polyshard.exceptions import ConfigError
from polyshard_megatron_fsdp.megatron_fsdp.version import WHO

__all__ = ["MegatronFSDPConfig"]

_CLASS_NAME = {"type": "string", "minLength": 1}
_STYLES = ("colwise", "colwise_gather_output", "rowwise", "embedding_rowwise")


@accepts({"anyOf": [_CLASS_NAME, {"type": "array", "items": _CLASS_NAME, "minItems": 1}]})
def _names_units(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a module class, its dotted path or bare name, or a non-empty sequence of these."""
    entries = value if isinstance(value, list | tuple) else [value]
    if not entries or not all(isinstance(e, type) or (isinstance(e, str) and e) for e in entries):
        reject(instance, attribute, value, "a module class, its name or path, or a list of these")


@accepts({"type": "object", "additionalProperties": {"enum": _STYLES}, "minProperties": 1})
def _is_plan(instance: object, attribute: Attribute[Any], value: object) -> None:
    """Accept a mapping of module names to styles, ours by name or torch's own."""
    if not isinstance(value, Mapping) or not value:
        reject(instance, attribute, value, "a mapping of module names to parallel styles")
    for name, style in value.items():
        # By name, since torch is not to be imported for a config.
        bases = {f"{cls.__module__}.{cls.__name__}" for cls in type(style).__mro__}
        known = style in _STYLES if isinstance(style, str) else _TORCH_STYLE in bases
        if not isinstance(name, str) or not known:
            expected = f"for {name!r} one of {', '.join(_STYLES)} or a torch ParallelStyle"
            reject(instance, attribute, style, expected)


_TORCH_STYLE = "torch.distributed.tensor.parallel.style.ParallelStyle"


@frozen(kw_only=True)
class MegatronFSDPConfig(DistributedConfig):
    """Megatron-FSDP: parameters, gradients and optimizer state sharded by ZeRO stage.

    Attributes:
        megatron_fsdp_unit_modules: Classes of the modules whose parameters are gathered and
            freed together: a class, a dotted path, a bare class name, or a list. None derives
            them from the model (``_no_split_modules``, else the class of the repeated block).
        zero_dp_strategy: What is sharded over the data-parallel ranks: 0 nothing, 1 optimizer
            state, 2 gradients as well, 3 parameters as well.
        init_fsdp_with_meta_device: Whether the model is on the meta device and is initialized
            shard by shard, by the ``reset_parameters`` of its modules; not with stage 0.
        grad_reduce_in_fp32: Whether gradients are reduced in float32, and with
            ``preserve_fp32_weights`` accumulated in it too; False uses the dtype of the parameters.
        preserve_fp32_weights: Whether the optimizer steps a float32 copy of the weights; False
            steps the weights in the dtype that the model computes in.
        overlap_grad_reduce: Whether gradients are reduced during backward. Stages 2 and 3
            always do.
        overlap_param_gather: Whether parameters are gathered ahead of their use. Stage 3
            always does.
        check_for_nan_in_grad: Has no effect in the supported versions of megatron-fsdp, which
            is said once; ``report_nan_in_param_grad`` is what checks.
        report_nan_in_param_grad: Whether each gradient is checked for NaN and infinity; the
            step then fails on every rank and names the parameters.
        average_in_collective: Whether the reduction itself averages gradients, instead of a
            division before it. gloo cannot, so that there the division stays.
        disable_bucketing: Whether parameters are not split into buckets by size.
        calculate_per_token_loss: Whether gradients are summed over the ranks, not averaged, for
            losses that the script divides by the number of tokens itself.
        keep_fp8_transpose_cache: Whether FP8 parameters keep their transposed copy; needs
            Transformer Engine.
        nccl_ub: Whether NCCL user buffers are used; needs CUDA and NCCL's allocator.
        fsdp_double_buffer: Whether gathered parameters live in two persistent buffers.
        activation_checkpointing: Whether each unit's activations are recomputed in backward.
        outer_dp_sharding_strategy: With two data-parallel dimensions (HSDP), what is sharded
            over the outer one: 0 nothing, 1 optimizer state (with stage 3 only).
        tp_plan: How modules are split over the mesh dimension ``tp``: names (``*`` stands for one
            part of a name) to ``"colwise"``, ``"rowwise"``, ``"colwise_gather_output"``,
            ``"embedding_rowwise"`` or a torch ``ParallelStyle``. None takes the model's own plan.
    """

    strategy: ClassVar[str] = "megatron_fsdp"
    parallelism: ClassVar[frozenset[str]] = frozenset({"dp", "dp_replicate", "cp", "tp"})
    sequence_parallel: ClassVar[bool] = False

    megatron_fsdp_unit_modules: Any = field(default=None, validator=optional(_names_units))
    zero_dp_strategy: int = field(default=3, validator=is_one_of(0, 1, 2, 3))
    init_fsdp_with_meta_device: bool = field(default=False, validator=is_bool)
    grad_reduce_in_fp32: bool = field(default=False, validator=is_bool)
    preserve_fp32_weights: bool = field(default=False, validator=is_bool)
    overlap_grad_reduce: bool = field(default=True, validator=is_bool)
    overlap_param_gather: bool = field(default=True, validator=is_bool)
    check_for_nan_in_grad: bool = field(default=True, validator=is_bool)
    report_nan_in_param_grad: bool = field(default=False, validator=is_bool)
    average_in_collective: bool = field(default=False, validator=is_bool)
    disable_bucketing: bool = field(default=False, validator=is_bool)
    calculate_per_token_loss: bool = field(default=False, validator=is_bool)
    keep_fp8_transpose_cache: bool = field(default=False, validator=is_bool)
    nccl_ub: bool = field(default=False, validator=is_bool)
    fsdp_double_buffer: bool = field(default=False, validator=is_bool)
    activation_checkpointing: bool = field(default=False, validator=is_bool)
    outer_dp_sharding_strategy: int = field(default=0, validator=is_one_of(0, 1))
    tp_plan: Mapping[str, Any] | None = field(default=None, validator=optional(_is_plan))

    def __attrs_post_init__(self) -> None:
        """Refuse the combinations of fields that cannot work."""
        if self.init_fsdp_with_meta_device and self.zero_dp_strategy == 0:
            self._refuse(
                "init_fsdp_with_meta_device",
                "init_fsdp_with_meta_device=True needs zero_dp_strategy 1, 2 or 3, found 0, under "
                "which every rank holds the whole model; build the model on its device instead",
            )
        if self.outer_dp_sharding_strategy == 1 and self.zero_dp_strategy != 3:
            self._refuse(
                "outer_dp_sharding_strategy",
                "outer_dp_sharding_strategy=1 needs zero_dp_strategy=3, "
                f"found {self.zero_dp_strategy}",
            )

    def _refuse(self, name: str, problem: str) -> None:
        raise ConfigError(f"{type(self).__name__} ({WHO}): {problem}", field=name)
