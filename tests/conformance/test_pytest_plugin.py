"""The pytest plugin, driven by pytest runs of its own."""

import textwrap

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester):
    """Run pytest on one test file with the plugin loaded, as a third party would."""
    pytester.makeconftest('pytest_plugins = ["polyshard.conformance.pytest_plugin"]')

    def run(source, *options):
        pytester.makepyfile(textwrap.dedent(source))
        return pytester.runpytest("--strict-markers", "--import-mode=importlib", *options)

    return run


MULTI_RANK = """
    import os
    import pytest

    def rank():
        import torch.distributed as dist
        return dist.get_rank()

    def test_sizes(ranks, world_size):
        assert ranks.run(rank) == list(range(world_size))

    def test_pool_is_shared(ranks):
        assert ranks.run(os.getpid) == list(ranks.pids)

    @pytest.mark.world_size(3)
    def test_of_one_size(world_size):
        assert world_size == 3

    def test_without_ranks():
        pass
"""


def names(result):
    """Return the names of the collected tests, in their order."""
    return [line.rpartition("::")[2] for line in result.outlines if "::" in line]


def test_multi_rank_tests_run_at_each_default_size(run):
    result = run(MULTI_RANK, "-v")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines_random(
        ["*test_sizes?world1?*", "*test_sizes?world2?*", "*test_of_one_size?world3?*"]
    )


def test_tests_of_one_size_run_together(run):
    assert names(run(MULTI_RANK, "--collect-only", "-q")) == [
        "test_sizes[world1]",
        "test_pool_is_shared[world1]",
        "test_sizes[world2]",
        "test_pool_is_shared[world2]",
        "test_of_one_size[world3]",
        "test_without_ranks",
    ]


def test_world_size_option_limits_every_multi_rank_test(run):
    assert names(run(MULTI_RANK, "--collect-only", "-q", "--world-size", "2")) == [
        "test_sizes[world2]",
        "test_pool_is_shared[world2]",
        "test_without_ranks",
    ]


def test_world_size_option_is_repeatable(run):
    result = run(MULTI_RANK, "--collect-only", "-q", "--world-size", "4", "--world-size", "3")
    sizes = [name for name in names(result) if name.startswith("test_sizes")]
    assert sizes == ["test_sizes[world4]", "test_sizes[world3]"]


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_world_size_that_is_none_is_a_usage_error(run, size):
    result = run(MULTI_RANK, "--world-size", size)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--world-size*"])


STRATEGIES = """
    import pytest

    @pytest.mark.strategy("ddp")
    class TestDDP:
        def test_it(self):
            pass

    @pytest.mark.strategy("fsdp2")
    def test_fsdp2():
        pass

    def test_of_no_strategy():
        pass
"""


def test_every_strategy_runs_by_default(run):
    run(STRATEGIES).assert_outcomes(passed=3)


@pytest.mark.parametrize("name", ["fsdp2", "FSDP2", "fsdp"])
def test_strategy_option_leaves_out_other_strategies(run, name):
    result = run(STRATEGIES, "--strategy", name)
    result.assert_outcomes(passed=2, deselected=1)
    result.stdout.no_fnmatch_line("*test_it*")


def test_strategy_option_is_repeatable(run):
    run(STRATEGIES, "--strategy", "fsdp2", "--strategy", "ddp").assert_outcomes(passed=3)


def test_strategy_that_is_not_installed_is_a_usage_error(run):
    result = run(STRATEGIES, "--strategy", "fsdp3")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*fsdp3*installed*ddp, fsdp2*"])


def test_gpu_tests_are_skipped_without_one(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = """
        import pytest

        @pytest.fixture
        def costly():
            raise RuntimeError("set up for a test that is skipped")

        @pytest.mark.gpu
        def test_on_gpu(costly):
            pass
    """
    result = run(source, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs a CUDA device*"])
