"""What is known of a patch: what is wrong, in which versions, and which test shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import field, frozen
from packaging.specifiers import SpecifierSet

from polyshard_megatron_fsdp.megatron_fsdp.version import LAST_TESTED, OLDEST, require_version

__all__ = ["ALL", "TESTED", "Patch"]

#: Up to the last version that was tested: a later one may do otherwise what the patch rewrites.
TESTED = f"<={LAST_TESTED}"
#: Whatever the version: the patch does no harm where the fault is gone.
ALL = f">={OLDEST}"


@frozen
class Patch:
    """A fix of one fault of megatron-fsdp, from inside of it.

    Attributes:
        name: What it does, in a few words joined by hyphens.
        problem: What goes wrong without it.
        versions: The versions of megatron-fsdp that it is applied to.
        test: The test that shows the fault without the patch, as pytest names it, from the folder
            of the plugin's tests. When it fails, the fault is gone, and the patch may go.
        apply: What fixes it: a function that is called with what it patches, or the method that a
            patched class has in place of megatron-fsdp's.
    """

    name: str
    problem: str
    versions: SpecifierSet = field(converter=SpecifierSet)
    test: str
    apply: Callable[..., Any]

    @property
    def is_needed(self) -> bool:
        """Whether the installed version is one that it is applied to."""
        return self.versions.contains(require_version(), prereleases=True)
