"""ParameterGuard: a model whose parameters were replaced must not train on, silently wrong."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard.exceptions import RebuildError
from polyshard.parameters.dtensors import shard_like
from polyshard.parameters.slots import ParameterSlot, slots_of

__all__ = ["ParameterGuard"]

_ATTRIBUTE = "_polyshard_guard"


_DTYPE = attrgetter("dtype")


_TRAINED = attrgetter("requires_grad")


_CURE = "do it inside `with polyshard.rebuild(model):`"


class ParameterGuard:
    """Refuses what replaces Parameter objects outside ``polyshard.rebuild``.

    ``load_state_dict(assign=True)`` is refused when it is called, everything else at the next
    forward. Full tensors in a state dict that is loaded are cut to the shards that they replace.

    Args:
        model: The user's own root module, on which state dicts are loaded.
        called: The module that is called to train; ``ParameterGuard.of`` finds the guard by it.
        loads: Whether to look at what is loaded, too.

    Attributes:
        settles_training: Whether the strategy settles at the wrap which parameters are trained, so
            that none may be frozen or unfrozen later.
    """

    settles_training: ClassVar[bool] = False

    def __init__(self, model: nn.Module, called: nn.Module, *, loads: bool = True) -> None:
        self.in_rebuild = False
        self.model = model
        self.remember()
        if loads:
            loading: Any = model  # the two methods have no annotations
            loading.register_load_state_dict_pre_hook(self.before_load)
            loading.register_load_state_dict_post_hook(self.after_load)
        called.register_forward_pre_hook(self.before_forward, prepend=True)
        called.__dict__[_ATTRIBUTE] = self

    def remember(self) -> None:
        """Take what the model holds now for what it must hold."""
        self.expected = [
            (slot, p, p.dtype, p.requires_grad if self.settles_training else None)
            for slot, p in _all_slots(self.model)
        ]
        self.parameters = [parameter for _, parameter, *_ in self.expected]
        modules = list(self.model.modules())
        self.tables: list[dict[str, Any]] = [m._parameters for m in modules]
        self.tables += [m._modules for m in modules]
        self.parts = self._present_parts()
        self.traits = self._present_traits()

    def _present_parts(self) -> list[object]:
        """Return everything that the known modules hold now, in order."""
        return list(chain.from_iterable(map(dict.values, self.tables)))

    def _present_traits(self) -> list[list[object]]:
        """Return what must stay of each parameter, in lists that are made without a loop here."""
        kinds = (_DTYPE, _TRAINED) if self.settles_training else (_DTYPE,)
        return [list(map(kind, self.parameters)) for kind in kinds]

    @staticmethod
    def of(called: nn.Module) -> ParameterGuard | None:
        """Return the guard of a model; None where the strategy had nothing to wrap."""
        return called.__dict__.get(_ATTRIBUTE)

    def is_own(self, slot: ParameterSlot, parameter: nn.Parameter | None) -> bool:
        """Tell whether the strategy itself has put a parameter in a place for the time being."""
        return False

    def before_forward(self, *_: Any) -> None:
        """Raise if parameters are not those of the wrap, or not of their dtypes."""
        if torch.compiler.is_compiling():
            return
        if not self._is_as_remembered():
            self._check_slots()
            self._refuse_strangers()

    def _is_as_remembered(self) -> bool:
        """Tell quickly, for this is asked in every step, that nothing has changed."""
        present = self._present_parts()
        return (
            len(present) == len(self.parts)
            and all(map(is_, present, self.parts))
            and self._present_traits() == self.traits
        )

    def _check_slots(self) -> None:
        for slot, parameter, dtype, trained in self.expected:
            present = slot.get()
            if present is not parameter and not self.is_own(slot, present):
                raise RebuildError(
                    f"expected {slot.name!r} to be the parameter of parallelize, found another "
                    f"in its place, which would not be trained right; {_CURE}"
                )
            if present is parameter and parameter.dtype is not dtype:
                raise RebuildError(
                    f"expected {slot.name!r} to be of {dtype}, as at parallelize, found "
                    f"{parameter.dtype}; cast before parallelize, or {_CURE}"
                )
            if trained not in (None, parameter.requires_grad):
                raise RebuildError(
                    f"expected requires_grad={trained} for {slot.name!r}, as at parallelize, "
                    f"found {not trained}; choose what is trained before parallelize, or {_CURE}"
                )

    def _refuse_strangers(self) -> None:
        """Raise if parameters were added or removed, in modules that were too or not."""
        expected = {(slot.name, slot.module) for slot, *_ in self.expected}
        present = {(slot.name, slot.module) for slot, _ in _all_slots(self.model)}
        if changed := sorted({name for name, _ in expected ^ present}):
            raise RebuildError(
                "expected the parameters of parallelize, found others added or removed "
                f"({', '.join(changed)}), which would not be trained right; change what "
                "a model consists of before parallelize"
            )

    def before_load(
        self,
        model: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *_: Any,
    ) -> None:
        """Refuse an assigning load, and cut full tensors to shards."""
        slots = _all_slots(model)
        assigns = local_metadata.get("assign_to_params_buffers", False)
        if assigns and not self.in_rebuild and not all(p.is_meta for _, p in slots):
            raise RebuildError(
                "load_state_dict(assign=True): expected no parameter to be replaced after "
                f"parallelize; load without assign=True, or {_CURE}"
            )
        for slot, parameter in slots:
            value = state_dict.get(prefix + slot.name)
            if isinstance(parameter, DTensor) and _is_full(value, parameter):
                state_dict[prefix + slot.name] = shard_like(value, parameter)

    def after_load(self, _: nn.Module, _incompatible: Any) -> None:
        """Take what an assigning load has put in place of parameters without values."""
        if any(parameter.is_meta for _, parameter, *_ in self.expected):
            self.remember()


def _all_slots(model: nn.Module) -> list[tuple[ParameterSlot, nn.Parameter]]:
    return [(slot, p) for p, slots in slots_of(model).items() for slot in slots]


def _is_full(value: object, parameter: DTensor) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, DTensor)
        and value.shape == parameter.shape
    )
