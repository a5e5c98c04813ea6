"""Each patch is needed, by a test that shows the fault without it, and is in the documentation.

Where such a test fails, megatron-fsdp (or torch) is right: let the patch end with the version
before.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyshard.conformance import RankPool, RanksFailed
from polyshard.conformance.models import Block, build_model, global_batch, loss_of
from polyshard_megatron_fsdp.megatron_fsdp.patches import cuda_shim
from polyshard_megatron_fsdp.megatron_fsdp.patches.modules import MODULE_PATCHES
from polyshard_megatron_fsdp.megatron_fsdp.patches.table import PATCHES
from polyshard_megatron_fsdp.megatron_fsdp.private_names import buffers_module, local_of

sys.path.append(str(Path(__file__).parent))

from subjects import Bare, gradient_sum, mesh_of, plain_gradient_sum, share
from test_loud_faults import split_by_rows

TESTS = Path(__file__).parents[1]


def test_names_of_patches_are_unique():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_test_of_a_patch_exists(patch):
    file, function = patch.test.split("::")
    function, _, case = function.rstrip("]").partition("[")
    source = (TESTS / file).read_text()
    assert re.search(rf"^def {function}\(", source, re.MULTILINE), patch.test
    assert f'"{case}"' in source or not case, patch.test


def test_the_page_has_each_patch():
    page = TESTS.parents[2] / "docs" / "reference" / "megatron-fsdp-patches.md"
    rows = [
        f"| `{patch.name}` | {patch.problem} | `{patch.versions}` | `{patch.test}` |"
        for patch in PATCHES
    ]
    lines = page.read_text().splitlines()
    assert [line for line in lines if line.startswith("| `")] == rows, (
        "run: python docs/generate.py"
    )


def shim_without(*names: str) -> None:
    """Apply in this process what running without CUDA takes, but for patches of these names."""
    for patch in cuda_shim.SHIM_PATCHES:
        if patch.name not in names:
            patch.apply()
    cuda_shim._prepared_for = "cpu"


def wrap_without_cuda_shim() -> None:
    shim_without(*(patch.name for patch in cuda_shim.SHIM_PATCHES))
    loss_of(Bare().wrap(build_model("plain"), 3), global_batch(0)).backward()


def test_cuda_is_used_on_the_cpu():
    with RankPool(2, timeout=60) as pool, pytest.raises(RanksFailed, match=r"(?i)cuda|nvidia"):
        pool.run(wrap_without_cuda_shim)


def warnings_about_devices() -> list[str]:
    shim_without("no-warning-about-devices")
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("megatron_fsdp.megatron_fsdp").addHandler(handler)
    Bare().wrap(build_model("plain"), 3)
    return [message for message in heard if "instead of the current device" in message]


def test_model_on_the_cpu_is_warned_about():
    with RankPool(2, timeout=60) as pool:
        assert all(pool.run(warnings_about_devices))


def most_coalesced_gathers_in_flight() -> int:
    """Return how many have been started at most, and not waited for, in a forward and backward."""
    shim_without("collectives-in-turn")
    buffers = buffers_module()
    coalescing_manager = buffers._coalescing_manager
    in_flight: set[int] = set()
    counts = [0]

    @contextmanager
    def counted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with coalescing_manager(*args, **kwargs) as handle:
            yield handle
        if not kwargs.get("async_ops"):
            return
        wait = handle.wait

        def waited() -> None:
            wait()
            in_flight.discard(id(handle))

        handle.wait = waited
        in_flight.add(id(handle))
        counts.append(len(in_flight))

    buffers._coalescing_manager = counted
    model = Bare().wrap(build_model("frozen"), 3)
    loss_of(model, share(global_batch(0))).backward()
    model.synchronize_param_gather()
    return max(counts)


def test_coalesced_gathers_are_in_flight_at_once():
    # Whether gloo still corrupts the heap with them no test can tell: most runs survive it.
    with RankPool(2, timeout=60) as pool:
        assert min(pool.run(most_coalesced_gathers_in_flight)) > 1


def wrap_on_one_dimension() -> None:
    from megatron_fsdp import fully_shard_model

    cuda_shim.prepare(torch.device("cpu"))
    fully_shard_model(
        build_model("plain"),
        device_mesh=mesh_of({"dp": dist.get_world_size()}),
        dp_shard_dim="dp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        device=torch.device("cpu"),
    )


def test_mesh_needs_a_tensor_dimension(bare_ranks):
    with pytest.raises(RanksFailed, match="ValueError"):
        bare_ranks.run(wrap_on_one_dimension)


def wrong_shapes_of_rowwise_gradients(steps: int) -> int:
    """Return how many gradients are not of their parameter's shape after the last step.

    The patch of the wrap is there, and that of the second step is not.
    """
    cuda_shim.prepare(torch.device("cpu"))
    next(p for p in MODULE_PATCHES if p.name == "local-trailing-shape").apply(buffers_module())
    model = Bare().wrap(*split_by_rows(3))
    for step in range(steps):
        model.zero_grad_buffer()
        loss_of(model, global_batch(step)).backward()
    with_gradient = [p for p in model.parameters() if p.grad is not None]
    return sum(local_of(p).shape != local_of(p.grad).shape for p in with_gradient)


def test_second_step_of_rowwise_modules_is_wrong():
    with RankPool(4, timeout=60) as pool:
        assert pool.run(wrong_shapes_of_rowwise_gradients, 1) == [0, 0, 0, 0]
        assert max(pool.run(wrong_shapes_of_rowwise_gradients, 2)) > 0


def reduce_with_a_factor() -> None:
    model = Bare().wrap(build_model("plain"), 3)
    model.ddp_config.gradient_reduce_div_fusion = True
    loss_of(model, share(global_batch(0))).backward()


def test_gloo_cannot_scale(bare_ranks):
    with pytest.raises(RanksFailed, match="ReduceOp"):
        bare_ranks.run(reduce_with_a_factor)


def parameters_in_three_places() -> int:
    """Return how many parameters a model has in three places that one was tied to."""
    plain = build_model("tied")
    plain.third = nn.Embedding(*plain.embedding.weight.shape)
    plain.third.weight = plain.embedding.weight
    module = Bare().wrap(plain, 3).module
    return len({id(part.weight) for part in (module.embedding, module.head, module.third)})


def test_third_place_of_a_tie_is_left_out(bare_ranks):
    assert bare_ranks.run(parameters_in_three_places) == [2, 2]


def gradients_after_zero_grad() -> float:
    """Return how many times too large gradients are after a backward that was to be forgotten."""
    model = Bare().wrap(build_model("plain"), 2)
    for _ in range(2):
        model.zero_grad()
        loss_of(model, share(global_batch(0))).backward()
    return gradient_sum(model) / plain_gradient_sum()


def test_zero_grad_leaves_gradients(bare_ranks):
    assert bare_ranks.run(gradients_after_zero_grad) == pytest.approx([2.0, 2.0], rel=1e-3)


def warnings_of_a_frozen_part() -> list[str]:
    model = Bare().wrap(build_model("frozen"), 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model.zero_grad_buffer()
            loss_of(model, share(global_batch(step))).backward()
            model.synchronize_param_gather()
    return [str(warning.message) for warning in caught if "pending" in str(warning.message)]


def test_frozen_part_warns(bare_ranks):
    assert any(bare_ranks.run(warnings_of_a_frozen_part))
