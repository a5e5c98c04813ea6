"""Hooks on gradients that do not keep alive what they work for."""

from __future__ import annotations

from collections.abc import Callable
from inspect import ismethod
from weakref import ReferenceType, WeakMethod, ref

from torch import Tensor

__all__ = ["weakly"]

_Hook = Callable[[Tensor], None]


def weakly(hook: _Hook) -> _Hook:
    """Return a hook that calls another for as long as something else holds that one.

    For ``Tensor.register_post_accumulate_grad_hook``: torch keeps these hooks where Python's
    garbage collector does not look, so that a hook that refers to its parameter's model keeps the
    model in memory to the end of the process.

    Args:
        hook: A function or a bound method; hold it, or the object that it is bound to, where the
            model does.
    """
    reference: ReferenceType[_Hook] = WeakMethod(hook) if ismethod(hook) else ref(hook)

    def call(parameter: Tensor) -> None:
        target = reference()
        if target is not None:
            target(parameter)

    return call
