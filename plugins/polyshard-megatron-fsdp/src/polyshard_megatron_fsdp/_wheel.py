"""The megatron-fsdp wheel: whether it is there, in which version. Nothing of it is imported."""

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
    "logger",
    "require_wheel",
    "warn_once",
    "wheel_version",
]

DISTRIBUTION = "megatron-fsdp"
#: This distribution, as error messages show it.
WHO = f"polyshard-megatron-fsdp {version('polyshard-megatron-fsdp')}"
OLDEST = Version("0.5.0")
#: What is mended is known to be wrong up to this version; later ones are left as they are.
LAST_TESTED = Version("0.6.1")

logger = logging.getLogger("polyshard_megatron_fsdp")


def wheel_version() -> Version | None:
    """Return the version of the installed wheel, None if there is none."""
    try:
        return Version(version(DISTRIBUTION))
    except PackageNotFoundError:
        return None


HAS_MEGATRON_FSDP = wheel_version() is not None


def require_wheel() -> Version:
    """Return the version of the installed wheel.

    Raises:
        PluginLoadError: It is missing or too old; the message has the command that installs it.
    """
    found = wheel_version()
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
