"""The names of parameters, without what wrappers add to them."""

from __future__ import annotations

from torch import nn

__all__ = ["canonical_parameter_name", "canonical_parameters", "strip_wrappers"]

#: What activation checkpointing and ``torch.compile`` put between the parts of a name.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def canonical_parameter_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the model as the user built it.

    The parts that DDP, activation checkpointing and ``torch.compile`` add are dropped.
    """
    return strip_wrappers(name).removeprefix("module.")


def strip_wrappers(name: str) -> str:
    """Return the canonical name of a parameter whose model no wrapper is around.

    The difference is seen in a model that has a ``module`` of its own.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def canonical_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under each of its names, without the wrappers inside the model.

    A tied parameter stands under all its names. ``model`` is the user's own root module: a
    wrapper around it, such as DDP's, is not looked through.
    """
    return {
        strip_wrappers(name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
