"""Every command that a person or CI runs here; ``nox -l`` lists them.

The environments are kept in ``.nox`` and reused, because each holds a copy of torch.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
CONSTRAINTS = os.environ.get("POLYSHARD_CONSTRAINTS", "constraints.txt")
PLUGIN = "plugins/polyshard-megatron-fsdp"


def install(
    session: nox.Session, *requirements: str, groups: tuple[str, ...] = (), plugin: bool = True
) -> None:
    """Install the core, editable, and what is asked for beside it.

    One pip command, so that the plugin's requirement of the core is met by the core next to it and
    the constraint on torch holds for all.
    """
    plugins = ["-e", PLUGIN] if plugin else []
    wanted = [*requirements, *nox.project.dependency_groups(PYPROJECT, *groups)]
    session.install("-c", CONSTRAINTS, "-e", ".", *plugins, *wanted)


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest with these arguments and those of the command line."""
    # Status 5, nothing to run, is to be expected where the command line chooses a file and the
    # session a strategy.
    accepted = [0, 5] if session.posargs else [0]
    command = ["python", "-m", "pytest", *arguments, *session.posargs]
    session.run(*command, env={"OMP_NUM_THREADS": "1"}, success_codes=accepted)


def run_tests_of(
    session: nox.Session, strategy: str, *arguments: str, requirements: Sequence[str] = ()
) -> None:
    """Install what a strategy needs, the plugin only for its own, and run the tests about it."""
    plugin = strategy == "megatron_fsdp"
    install(session, *requirements, groups=("test",), plugin=plugin)
    where = [] if plugin else [f"--ignore={PLUGIN}"]
    which = ["-m", "strategy", "--strategy", strategy]
    if strategy == "core":
        which = ["-m", "not strategy"]
    run_pytest(session, *where, *which, *arguments)


def world_sizes(*sizes: int) -> list[str]:
    """Return the arguments that make pytest run multi-rank tests at these sizes."""
    return [f"--world-size={size}" for size in sizes]


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-c", CONSTRAINTS, *nox.project.dependency_groups(PYPROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of both distributions with mypy in strict mode."""
    install(session, groups=("types", "test"))
    session.run("mypy")


@nox.session
@nox.parametrize("strategy", ["core", "ddp", "fsdp2", "megatron_fsdp"])
def tests(session: nox.Session, strategy: str) -> None:
    """Run the tests of one strategy, or all that are about none, at 1 and 2 ranks.

    Arguments after ``--`` go to pytest. Only megatron_fsdp has the plugin installed, so that the
    others show that the core does without. Tests that need more ranks are left to ``matrix``.
    """
    run_tests_of(session, strategy, *world_sizes(1, 2))


@nox.session(default=False)
@nox.parametrize(
    ("strategy", "requirements"),
    [
        nox.param("core", [], id="core"),
        nox.param("ddp", [], id="ddp"),
        nox.param("fsdp2", [], id="fsdp2"),
        *(
            nox.param("megatron_fsdp", [f"megatron-fsdp=={version}"], id=f"megatron_fsdp-{version}")
            for version in ("0.5.0", "0.5.1", "0.6.0", "0.6.1")
        ),
    ],
)
def matrix(session: nox.Session, strategy: str, requirements: list[str]) -> None:
    """Run the tests at 1, 2 and 4 ranks, and Megatron-FSDP's with each supported version.

    One environment serves all world sizes; ``-- -k world4`` chooses one.
    """
    run_tests_of(session, strategy, *world_sizes(1, 2, 4), requirements=requirements)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Run the examples in the documentation and follow its links."""
    install(session, groups=("test",))
    run_pytest(session, "tests/docs")


@nox.session(default=False)
def compare(session: nox.Session) -> None:
    """Train one model under several strategies and compare them: ``polyshard compare ARGS``."""
    install(session, *PYPROJECT["project"]["optional-dependencies"]["plot"])
    session.run("polyshard", "compare", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks, or those whose files are named after ``--``."""
    install(session)
    for script in session.posargs or sorted(Path("benchmarks").glob("*.py")):
        session.run("python", script)
