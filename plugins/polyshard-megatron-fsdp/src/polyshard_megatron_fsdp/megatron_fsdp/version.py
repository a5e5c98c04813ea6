"""Whether megatron-fsdp is installed, and in which version; nothing of it is imported."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from polyshard.exceptions import PluginLoadError

__all__ = [
    "HAS_MEGATRON_FSDP",
    "LAST_TESTED",
    "OLDEST",
    "WHO",
    "installed_version",
    "logger",
    "require_version",
    "warn_if_untested",
    "warn_once",
]

DISTRIBUTION = "megatron-fsdp"
#: This distribution, as error messages show it.
WHO = f"polyshard-megatron-fsdp {version('polyshard-megatron-fsdp')}"
OLDEST = Version("0.5.0")
#: Patches are known to be needed up to this version; a later one is used as it is.
LAST_TESTED = Version("0.6.1")

logger = logging.getLogger("polyshard_megatron_fsdp")


def installed_version() -> Version | None:
    """Return the version of the installed megatron-fsdp, None if there is none."""
    try:
        return Version(version(DISTRIBUTION))
    except PackageNotFoundError:
        return None


HAS_MEGATRON_FSDP = installed_version() is not None


def require_version() -> Version:
    """Return the version of the installed megatron-fsdp.

    Raises:
        PluginLoadError: It is missing or too old; the message has the command that installs it.
    """
    found = installed_version()
    if found is None or found < OLDEST:
        raise PluginLoadError(
            f"{WHO} needs {DISTRIBUTION} >= {OLDEST}, "
            f"found {found or 'none'}; run: pip install '{DISTRIBUTION}>={OLDEST}'"
        )
    return found


@cache
def warn_once(message: str) -> None:
    """Log a warning the first time that this process gives it."""
    logger.warning(message)


def warn_if_untested() -> None:
    """Say once that a version later than the last that was tested is not patched."""
    version = require_version()
    if version > LAST_TESTED:
        warn_once(
            f"megatron-fsdp {version} is later than {LAST_TESTED}, the last that was tested; "
            "it is used as it is"
        )
