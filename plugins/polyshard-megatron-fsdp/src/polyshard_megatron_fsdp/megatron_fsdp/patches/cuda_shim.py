"""Patches for models that are not on CUDA: what stands in for it inside megatron-fsdp.

Its modules use ``torch.cuda`` for streams and events. Off CUDA the *name* ``torch`` in those
modules is bound to a read-through proxy whose ``cuda`` has streams that do nothing, since there
every operation is finished when it returns. torch itself is left alone, and on CUDA nothing here
is active.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch

from polyshard.exceptions import UnsupportedError
from polyshard_megatron_fsdp.megatron_fsdp.patches.patch import ALL, Patch
from polyshard_megatron_fsdp.megatron_fsdp.private_names import buffers_module, modules_with_torch

__all__ = ["SHIM_PATCHES", "prepare"]

_prepared_for: str | None = None


def prepare(device: torch.device) -> None:
    """Make megatron-fsdp's modules fit for a device; call it before the wrap.

    Raises:
        UnsupportedError: The process has wrapped a model on another type of device; the
            modules serve all models of the process and fit one type only.
    """
    global _prepared_for
    if _prepared_for not in (None, device.type):
        raise UnsupportedError(
            f"expected every Megatron-FSDP model of a process on one type of device, found "
            f"{device.type!r} after {_prepared_for!r}; use one process for each"
        )
    if _prepared_for is None and device.type != "cuda":
        for patch in SHIM_PATCHES:
            if patch.is_needed:
                patch.apply()
    _prepared_for = device.type


def _replace_cuda() -> None:
    proxy = _ReadThrough(
        torch,
        cuda=_ReadThrough(torch.cuda, **_CUDA),
        tensor=_tensor,
    )
    for module in modules_with_torch():
        module.torch = proxy  # type: ignore[attr-defined]


def _run_one_after_the_other() -> None:
    """Replace collectives, in the modules whose ``torch`` is a stand-in already."""
    buffers_module()._coalescing_manager = _one_after_the_other
    for module in modules_with_torch():
        module.torch.distributed = _ReadThrough(torch.distributed, **_COLLECTIVES)


def _be_quiet_about_cuda() -> None:
    logging.getLogger("megatron_fsdp.megatron_fsdp").addFilter(_is_not_about_cuda)


class _ReadThrough(ModuleType):
    """A module with some names of its own; every other name is the real module's."""

    def __init__(self, real: ModuleType, **own: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(own)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Event:
    """An event that has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """A stream on which nothing is ever outstanding."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True


_STREAM = _Stream()


def _in_stream(stream: object) -> AbstractContextManager[None]:
    return nullcontext()


def _nothing(device: object = None) -> None:
    """Do what waiting, or freeing cached memory, does where there is none."""


_CUDA = {
    "Event": _Event,
    "Stream": _Stream,
    "stream": _in_stream,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "current_device": lambda: 0,
    "is_available": lambda: False,
    "synchronize": _nothing,
    "empty_cache": _nothing,
}


def _tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Make a tensor whose ``cuda()`` is itself: megatron-fsdp moves one that it made so."""
    tensor = torch.tensor(*args, **kwargs)
    tensor.cuda = lambda *_, **__: tensor  # type: ignore[method-assign]
    return tensor


class _Finished:
    """The handle of collectives that are done."""

    def wait(self, *_: Any) -> bool:
        return True


def _at_once(collective: Callable[..., Any]) -> Callable[..., _Finished]:
    """Return a collective that is done when it returns, also where it is asked not to wait."""

    def run(*args: Any, async_op: bool = False, **kwargs: Any) -> _Finished:
        collective(*args, **kwargs)
        return _Finished()

    return run


#: megatron-fsdp calls two of them by names that torch has deprecated, which warns at each use.
_COLLECTIVES = {
    "all_gather_into_tensor": _at_once(torch.distributed.all_gather_single),
    "reduce_scatter_tensor": _at_once(torch.distributed.reduce_scatter_single),
    "all_reduce": _at_once(torch.distributed.all_reduce),
}


@contextmanager
def _one_after_the_other(*_: Any, **__: Any) -> Iterator[_Finished]:
    """Stand in for torch's manager that runs the collectives of its body as one.

    torch 2.13's gloo corrupts the heap when two such all-gathers are in flight, which crashes a
    quarter of all runs, and once in thousands of runs with a single one that is waited for. What
    this costs is the overlap, of which there is little on a CPU.
    """
    yield _Finished()


def _is_not_about_cuda(record: logging.LogRecord) -> bool:
    """Drop the warning that the model is not on the current CUDA device, which is the intent."""
    return "instead of the current device" not in record.getMessage()


SHIM_PATCHES = (
    Patch(
        name="cuda-shim",
        problem="streams and events of `torch.cuda` are used whatever the device; not on CUDA",
        versions=ALL,
        test="megatron_fsdp/test_patches.py::test_cuda_is_used_on_the_cpu",
        apply=_replace_cuda,
    ),
    Patch(
        name="collectives-in-turn",
        problem="several coalesced all-gathers are in flight at once, with which torch 2.13's gloo "
        "corrupts the heap; not on CUDA",
        versions=ALL,
        test="megatron_fsdp/test_patches.py::test_coalesced_gathers_are_in_flight_at_once",
        apply=_run_one_after_the_other,
    ),
    Patch(
        name="no-warning-about-devices",
        problem="a model on the CPU logs a warning that this is not the current CUDA device; not "
        "on CUDA",
        versions=ALL,
        test="megatron_fsdp/test_patches.py::test_model_on_the_cpu_is_warned_about",
        apply=_be_quiet_about_cuda,
    ),
)
