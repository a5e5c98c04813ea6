"""DDPConfig."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from attrs import evolve, field, frozen

from polyshard.config.base import DistributedConfig
from polyshard.config.fields import is_bool, is_number, is_one_of, optional, to_dtype_name

__all__ = ["DDPConfig"]


@frozen(kw_only=True)
class DDPConfig(DistributedConfig):
    """How torch's DistributedDataParallel trains the model.

    Every rank holds all weights, starting with those of rank 0.

    Attributes:
        activation_checkpointing: Whether each repeated block computes its activations again in
            backward: False, True or ``"full"``, or ``"selective"``, which keeps the results of
            matrix products and attention.
        broadcast_buffers: Whether each forward begins with the buffers of rank 0. They are
            those of rank 0 at the start in any case.
        find_unused_parameters: Whether parameters may stay without gradient in a step.
        static_graph: Whether every step uses the same parameters in the same way.
        bucket_cap_mb: Size of the buckets in which gradients are reduced, in MiB; None is
            torch's default.
        gradient_as_bucket_view: Whether gradients are views into the buckets, which saves a copy.
        autocast_dtype: Dtype of ``torch.autocast`` in the forward, bfloat16 or float16; None turns
            it off.
    """

    strategy: ClassVar[str] = "ddp"

    activation_checkpointing: bool | Literal["full", "selective"] = field(
        default=False, validator=is_one_of(False, True, "full", "selective")
    )
    broadcast_buffers: bool = field(default=True, validator=is_bool)
    find_unused_parameters: bool = field(default=False, validator=is_bool)
    static_graph: bool = field(default=False, validator=is_bool)
    bucket_cap_mb: float | None = field(
        default=None, validator=optional(is_number(0, exclusive=True))
    )
    gradient_as_bucket_view: bool = field(default=False, validator=is_bool)
    autocast_dtype: str | None = field(
        default=None,
        converter=to_dtype_name,
        validator=optional(is_one_of("bfloat16", "float16")),
    )

    def in_full_precision(self) -> Self:
        """Return this config without autocast."""
        return evolve(self, autocast_dtype=None)
