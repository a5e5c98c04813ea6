"""MixedPrecision, the part of a config that says in which dtype what is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from polyshard.config.fields import is_bool, is_dtype, optional, to_dtype_name

if TYPE_CHECKING:
    import torch

__all__ = ["MixedPrecision", "torch_dtype"]


@frozen(kw_only=True)
class MixedPrecision:
    """The dtypes of compute, reduction and output.

    Dtypes are held by name, so that a config does not need torch; every usual spelling and a
    ``torch.dtype`` are accepted. None means the dtype that the model itself has.

    Attributes:
        param_dtype: Dtype of the parameters in forward and backward.
        reduce_dtype: Dtype in which gradients are reduced over the ranks.
        output_dtype: Dtype that the model's floating-point outputs are cast to.
        cast_forward_inputs: Whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: str | None = field(
        default="bfloat16", converter=to_dtype_name, validator=optional(is_dtype)
    )
    reduce_dtype: str | None = field(
        default="float32", converter=to_dtype_name, validator=optional(is_dtype)
    )
    output_dtype: str | None = field(
        default="float32", converter=to_dtype_name, validator=optional(is_dtype)
    )
    cast_forward_inputs: bool = field(default=True, validator=is_bool)


def torch_dtype(name: str | None) -> torch.dtype | None:
    """Return the ``torch.dtype`` of a name that a config holds; None stays None."""
    if name is None:
        return None
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype
