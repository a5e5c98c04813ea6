"""What `import polyshard` costs beside the imports of attrs and pluggy: at most twice as much.

Each figure is the median over fresh interpreters, less that of an empty one.
"""

import statistics
import subprocess
import sys
import time

ROUNDS = 15
STATEMENTS = {
    "nothing": "pass",
    "attrs and pluggy": "import attrs, pluggy",
    "polyshard": "import polyshard",
    "polyshard, every strategy listed": "import polyshard; polyshard.available_strategies()",
}


def seconds(statement: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - begin


def main() -> None:
    # Rounds on the outside, so that a slow moment of the machine hits every statement alike.
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(ROUNDS):
        for name, statement in STATEMENTS.items():
            times[name].append(seconds(statement))
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["attrs and pluggy"] - medians["nothing"]
    print("import cost, as a multiple of importing attrs and pluggy")
    for name in list(STATEMENTS)[1:]:
        print(f"  {name:34} {(medians[name] - medians['nothing']) / base:6.2f}")


if __name__ == "__main__":
    main()
