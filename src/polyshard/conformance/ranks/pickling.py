"""Pickles that refer to functions and classes by file, so that test modules need not be importable.

pytest's importlib mode gives a test module a name that no other process can import. A function or
class is therefore sent as (module name, file, qualified name); the receiver imports the name if
that leads to the same file, and otherwise loads the file under that name.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import operator
import pickle
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


class _ByFilePickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if obj is _find or not isinstance(obj, FunctionType | type):
            return NotImplemented
        module = sys.modules.get(obj.__module__)
        file = getattr(module, "__file__", None)
        if file is None or _attribute(module, obj.__qualname__) is not obj:
            return NotImplemented  # pickle's own way, or its own refusal
        return _find, (obj.__module__, str(Path(file).resolve()), obj.__qualname__)


def dumps(obj: object) -> bytes:
    """Pickle an object for another process on this machine.

    Raises TypeError for what cannot be sent, such as a lambda or a function defined inside another.
    """
    buffer = io.BytesIO()
    try:
        _ByFilePickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"cannot be sent to another process: {error}. "
            "Use functions and classes from the top level of a module, and picklable values."
        ) from error
    return buffer.getvalue()


def _attribute(module: ModuleType | None, qualified_name: str) -> object:
    try:
        return operator.attrgetter(qualified_name)(module)
    except AttributeError:  # "<locals>" and "<lambda>" are attributes of nothing
        return None


def _find(module_name: str, file: str, qualified_name: str) -> Any:
    return operator.attrgetter(qualified_name)(_module(module_name, file))


def _module(name: str, file: str) -> ModuleType:
    if name == "__main__":
        name = "__mp_main__"  # as multiprocessing names it: the script's main part must not run
    module = sys.modules.get(name) or _import(name)
    if module is None or not _is_from(module, file):
        module = _load(name, file)
    return module


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise  # the module is there, and something that it imports is not


def _is_from(module: ModuleType, file: str) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and str(Path(found).resolve()) == file


def _load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"expected a Python source file, found {file}", name=name, path=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
