"""Where a model has to be before a strategy takes it, and the checks of what it is."""

from __future__ import annotations

from torch import nn

from polyshard.exceptions import ModelError

__all__ = ["require_dimensions", "require_materialized", "require_parameters"]


def require_parameters(model: nn.Module, strategy: str, *, trainable: bool) -> None:
    """Raise unless the model has parameters, of which one is trained if ``trainable``.

    Raises:
        ModelError: It has none.
    """
    kind = "a trainable parameter" if trainable else "a parameter"
    if not any(p.requires_grad or not trainable for p in model.parameters()):
        raise ModelError(
            f"strategy {strategy!r}: expected a model with {kind}, found {type(model).__name__} "
            "with none; there is nothing to distribute"
        )


def require_dimensions(model: nn.Module, strategy: str) -> None:
    """Raise if a parameter is a scalar, which cannot be sharded.

    Raises:
        ModelError: One is; it is named.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ModelError(
                f"strategy {strategy!r}: expected parameters of at least one dimension, found the "
                f"scalar {name!r}; give it the shape (1,)"
            )


def require_materialized(model: nn.Module, strategy: str) -> None:
    """Raise if a parameter or buffer is on the meta device, which holds no values.

    Raises:
        ModelError: Some are; the first is named.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise ModelError(
            f"strategy {strategy!r}: expected values in every parameter and buffer, found "
            f"{len(on_meta)} on the meta device ({on_meta[0]}, ...); call model.to_empty() and "
            "load or initialise them first"
        )
