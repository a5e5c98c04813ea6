"""The errors of Polyshard.

Each class is also the built-in error that its kind of mistake is usually reported with, so
that ``except ValueError`` in a caller goes on working.
"""

__all__ = [
    "ConfigError",
    "LaunchError",
    "MeshError",
    "ModelError",
    "OptimizerError",
    "OptimizerNotShardableError",
    "PeerFailedError",
    "PluginError",
    "PluginLoadError",
    "PolyshardError",
    "RanksDisagreeError",
    "RebuildError",
    "StrategyNotFoundError",
    "UnitError",
    "UnsupportedError",
]


class PolyshardError(Exception):
    """The root of every error that Polyshard itself raises."""


class ConfigError(PolyshardError, ValueError):
    """A config value, key or file is not what its field accepts.

    Attributes:
        field: Name of the field at fault; None where no single one is.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class MeshError(PolyshardError, ValueError):
    """Parallelism sizes or a device mesh do not fit the job or the strategy.

    Attributes:
        field: Name of the size at fault; None where no single one is.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelError(PolyshardError, ValueError):
    """The model cannot be distributed as it is."""


class UnitError(PolyshardError, ValueError):
    """The modules to shard or checkpoint as one unit could not be determined."""


class UnsupportedError(PolyshardError, NotImplementedError):
    """The combination that was asked for is known not to work and is refused."""


class StrategyNotFoundError(PolyshardError, LookupError):
    """No installed strategy has the name or the config that was given."""


class PluginError(PolyshardError):
    """A plugin does not follow the hook interface, or two claim the same name."""


class PluginLoadError(PluginError, ImportError):
    """A plugin, or something that it depends on, could not be imported."""


class OptimizerError(PolyshardError, ValueError):
    """The optimizer does not belong to the model, or was made at the wrong time."""


class OptimizerNotShardableError(OptimizerError, AssertionError):
    """The guard: this optimizer must not be sharded under this strategy.

    It is an ``AssertionError`` for those who catch that, but it is raised, never asserted, and
    so survives ``python -O``.
    """


class RebuildError(PolyshardError, RuntimeError):
    """Parameters were replaced in a way that would train wrongly."""


class PeerFailedError(PolyshardError, RuntimeError):
    """Another rank failed in a step that all ranks take together.

    Attributes:
        rank: Global rank that failed first.
        error: That rank's error, as ``"TypeName: message"``.
    """

    def __init__(self, message: str, *, rank: int, error: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.error = error


class RanksDisagreeError(PolyshardError, RuntimeError):
    """Ranks were started with different plugins, configs or models."""


class LaunchError(PolyshardError, RuntimeError):
    """The processes of a run could not be started, or one of them failed."""
