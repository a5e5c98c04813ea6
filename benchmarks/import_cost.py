"""What a first use of Polyshard costs beside the imports of attrs and pluggy.

The aim is at most twice as much. Each figure is the median over fresh interpreters, less that of
an empty one; the statements take turns, so that a slow moment of the machine hits all alike.

The list of strategies is read from entry points, for which Python has importlib.metadata: it
imports email, zipfile and csv, and that alone costs about as much as attrs. The last line but one
measures it. Neither torch nor a strategy nor any other dependency is imported by these statements;
a test holds that.
"""

import statistics
import subprocess
import sys
import time

ROUNDS = 25
CONFIGS = "import polyshard; polyshard.DDPConfig(); polyshard.FSDP2Config()"
STATEMENTS = {
    "nothing": "pass",
    "attrs and pluggy": "import attrs, pluggy",
    "polyshard": "import polyshard",
    "polyshard and its configs": CONFIGS,
    "importlib.metadata beside attrs and pluggy": "import attrs, pluggy, importlib.metadata",
    "polyshard, configs, every strategy listed": f"{CONFIGS}; polyshard.available_strategies()",
}


def seconds(statement: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - begin


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(ROUNDS):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["attrs and pluggy"] - medians["nothing"]
    print("import cost, as a multiple of importing attrs and pluggy")
    for name in list(STATEMENTS)[1:]:
        print(f"  {name:44} {(medians[name] - medians['nothing']) / base:6.2f}")


if __name__ == "__main__":
    main()
