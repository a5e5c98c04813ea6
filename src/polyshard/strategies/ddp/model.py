"""DataParallelModel: DistributedDataParallel with the attributes and methods of what it wraps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from polyshard.exceptions import UnsupportedError
from polyshard.strategies.ddp.guard import DDPGuard
from polyshard.transforms.methods import (
    attribute_behind,
    has_gradients,
    refuse_shadowed,
    tensors_in,
)

__all__ = ["DataParallelModel"]


class DataParallelModel(DistributedDataParallel):
    """A ``DistributedDataParallel`` through which the attributes of the user's module are read.

    Its own attributes come first. Methods that were added to it are prepared as a forward is.
    """

    def add_methods(self, names: Sequence[str]) -> None:
        """Prepare these methods of the user's module as a forward from now on.

        Raises:
            UnsupportedError: The wrapper has another attribute of that name.
        """
        refuse_shadowed(self, names)
        self.__dict__["_prepared_methods"] = frozenset(names)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__.get("_prepared_methods", ()):
                return self._prepared(getattr(self.module, name))
            return attribute_behind(self, name)

    def _prepared(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call_as_forward(method, args, kwargs)

        return call

    def _call_as_forward(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do around a method what is done around a forward; ranks meet before its body alone.

        Whether there will be a backward is known only when the method has returned: many turn
        gradients off inside. So the reducer prepares for one then, which takes no other rank.
        """
        guard = DDPGuard.of(self)
        if isinstance(guard, DDPGuard):
            guard.before_forward()
        trains = torch.is_grad_enabled() and self.require_backward_grad_sync
        try:
            if trains:
                self.reducer._rebuild_buckets()
            with torch.no_grad():
                args, kwargs = self._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]
            # Also where the method raises, so that ranks agree on when buffers are sent next.
            self.require_forward_param_sync = trains
            before = self._gradient_versions()
            output = method(*args, **kwargs)
            if trains and self._gradient_versions() != before:
                raise UnsupportedError(
                    f"{method.__name__}: expected backward to be called on what a method returns, "
                    "found that the method has called it itself, before gradients could be "
                    "averaged; return the loss instead"
                )
        finally:
            if isinstance(guard, DDPGuard):
                guard.after_forward()
        # What is in an object of another kind is not known.
        if trains and (has_gradients(output) or not any(True for _ in tensors_in(output))):
            self.reducer.prepare_for_forward()
            output = self._post_forward(output)  # type: ignore[no-untyped-call]
        return output

    def _gradient_versions(self) -> list[tuple[int, int] | None]:
        """Return what changes when a backward adds to a gradient."""
        gradients = (parameter.grad for parameter in self.module.parameters())
        return [None if g is None else (id(g), g._version) for g in gradients]
