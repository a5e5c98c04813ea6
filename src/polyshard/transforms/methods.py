"""Methods of a model beside its forward: which ones there are, and how they are reached.

A strategy prepares a model at its forward. What another method computes with is prepared only if
the strategy knows of that method; one that it does not know must not train silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from polyshard._describe import describe_value
from polyshard.exceptions import ModelError, UnsupportedError

__all__ = [
    "attribute_behind",
    "has_gradients",
    "method_names",
    "refuse_shadowed",
    "tensors_in",
]

#: What a strategy is told of where the user names nothing.
_USUAL = "generate"


def method_names(model: nn.Module, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the methods that a model shall have under a strategy, each once.

    Args:
        model: As the user built it.
        names: Of its methods; None for ``generate`` if it has that.

    Raises:
        ModelError: One of them is no method of the model's own that is done when it returns.
    """
    if names is None:
        return (_USUAL,) if _why_not(model, _USUAL) is None else ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"methods: expected a sequence of names, found {describe_value(names)}; write "
            'methods=("generate",)'
        )
    for name in names:
        problem = _why_not(model, name)
        if problem is not None:
            raise ModelError(
                f"methods: expected names of methods of {type(model).__name__}, found {name!r}, "
                f"{problem}; name what the model has, or leave it out"
            )
    return tuple(dict.fromkeys(names))


def _why_not(model: nn.Module, name: str) -> str | None:
    """Return why a strategy cannot prepare a method; None if it can."""
    if hasattr(nn.Module, name):
        return "which every module has, and which needs no preparation"
    missing = object()
    method = getattr(model, name, missing)
    if method is missing:
        return "which it lacks"
    if not inspect.ismethod(method):
        return f"which is no method but {describe_value(method)}"
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(kind(inspect.unwrap(method)) for kind in kinds):
        return "which goes on after it has returned: a generator or a coroutine"
    return None


def refuse_shadowed(wrapper: nn.Module, names: Sequence[str]) -> None:
    """Raise if the wrapper around a model has an attribute of its own of one of these names.

    Raises:
        UnsupportedError: It has, and the model's method cannot be reached through it.
    """
    for name in names:
        if hasattr(type(wrapper), name) or name in wrapper.__dict__:
            raise UnsupportedError(
                f"methods: expected names that the wrapper around the model leaves free, found "
                f"{name!r}, which {type(wrapper).__name__} has itself; give the method another name"
            )


def attribute_behind(wrapper: nn.Module, name: str) -> Any:
    """Return an attribute of the module inside a wrapper, which the wrapper itself lacks.

    A method that the strategy was not told of comes back such that it refuses to return what could
    be trained: its gradients would be this rank's alone.

    Args:
        wrapper: Holds the user's module as ``module``.
        name: Of the attribute. Special names are those of the wrapper alone.

    Raises:
        AttributeError: The user's module lacks it, too.
    """
    module = wrapper._modules.get("module") if "_modules" in wrapper.__dict__ else None
    if module is None or (name.startswith("__") and name.endswith("__")):
        raise AttributeError(f"{type(wrapper).__name__!r} object has no attribute {name!r}")
    value = getattr(module, name)
    # A method of a module inside counts as well: peft's models hand out those of what they adapt.
    if inspect.ismethod(value) and isinstance(value.__self__, nn.Module):
        return _refusing_gradients(value, name, module)
    return value


def _refusing_gradients(
    method: Callable[..., Any], name: str, module: nn.Module
) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if torch.is_grad_enabled() and has_gradients(result):
            raise UnsupportedError(
                f"{type(module).__name__}.{name}: expected a method that parallelize was told of, "
                "or no gradients, found a result to call backward on, whose gradients the ranks "
                f'would not share; name it in parallelize(..., methods=("{name}",)), or call it '
                "under torch.no_grad()"
            )
        return result

    return call


def has_gradients(result: object) -> bool:
    """Tell whether there is a tensor in a method's result that was computed with gradients."""
    return any(tensor.grad_fn is not None for tensor in tensors_in(result))


def tensors_in(result: object) -> Iterator[Tensor]:
    """Yield the tensors in a method's result, where DistributedDataParallel looks for them."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for entry in result:
            yield from tensors_in(entry)
    elif isinstance(result, dict):
        yield from tensors_in(tuple(result.values()))
    elif is_dataclass(result) and not isinstance(result, type):
        yield from tensors_in(tuple(getattr(result, field.name) for field in fields(result)))
