"""Run a module's forward under ``torch.autocast``, without another wrapper around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["autocast_forward"]


def autocast_forward(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Make every forward of the model run under autocast; it is changed in place.

    What the model returns keeps the dtype that autocast gave it.

    Args:
        model: The model, before or after it is wrapped.
        dtype: Dtype of the operations that autocast lowers.
        device_type: Type of the device that computes, such as ``"cpu"``.
    """
    region = _Autocast(dtype, device_type)
    model.register_forward_pre_hook(region.enter, prepend=True)
    model.register_forward_hook(region.leave, always_call=True)


class _Autocast:
    """The autocast regions of the forwards in progress: more than one in a recursive model."""

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self.dtype = dtype
        self.device_type = device_type
        self.regions: list[torch.autocast] = []

    def enter(self, *_: Any) -> None:
        region = torch.autocast(self.device_type, self.dtype)
        region.__enter__()  # type: ignore[no-untyped-call]
        self.regions.append(region)

    def leave(self, *_: Any) -> None:
        self.regions.pop().__exit__(None, None, None)
