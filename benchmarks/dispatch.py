"""What the way through the registry adds to a direct call: at most 10 microseconds."""

import statistics
import timeit
from typing import Any, ClassVar

from attrs import frozen

from polyshard import DistributedConfig, hookimpl
from polyshard.registry.registry import StrategyRegistry

CALLS = 5_000
ROUNDS = 9


def strategy(name: str) -> tuple[object, type[DistributedConfig]]:
    """Make a plugin that only returns its arguments, and the config that names it."""

    class Plugin:
        @hookimpl
        def parallelize(self, config: Any, model: Any, mesh: Any, optimizer: Any) -> Any:
            return model, optimizer

    @frozen(kw_only=True)
    class Config(DistributedConfig):
        strategy: ClassVar[str] = name

    return Plugin(), Config


def microseconds(call: Any) -> float:
    timings = timeit.repeat(call, number=CALLS, repeat=ROUNDS)
    return statistics.median(timings) / CALLS * 1e6


def main() -> None:
    registry = StrategyRegistry(installed={})
    print("microseconds that the registry adds to a direct call")
    for count in (1, 2, 8):
        while len(registry.available()) < count:
            plugin, config_class = strategy(f"strategy{len(registry.available())}")
            registry.register(plugin, config_class=config_class)
        arguments = {"config": config_class(), "model": "m", "mesh": None, "optimizer": None}
        direct = microseconds(lambda: plugin.parallelize(**arguments))  # noqa: B023
        through = microseconds(lambda: registry.dispatch("parallelize", **arguments))  # noqa: B023
        print(f"  {count} strategies loaded {through - direct:8.2f}")


if __name__ == "__main__":
    main()
