"""The comparison of two trainings: what it takes for equal, and what it says of what is not."""

import math

import pytest
import torch
from attrs import evolve

from polyshard.conformance.models import BATCH, MODELS, build_model, global_batch
from polyshard.conformance.parity import TOLERANCE, ParityError, assert_parity, assert_same_weights
from polyshard.conformance.recipes import Recipe
from polyshard.conformance.trainings import train_plain

RECIPE = Recipe(steps=2, max_norm=0.1, evaluate="after step")


@pytest.mark.parametrize("name", MODELS)
def test_models_depend_on_the_seed_alone(name):
    state = torch.random.get_rng_state()
    first, again, other = (build_model(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same_weights(first, again)
    with pytest.raises(ParityError, match="differ from one process"):
        assert_same_weights(first, other)


def test_each_step_has_its_own_batch():
    assert torch.equal(global_batch(0), global_batch(0))
    assert not torch.equal(global_batch(0), global_batch(1))
    assert len(global_batch(0)) == BATCH


def test_tied_model_is_tied():
    model = build_model("tied")
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("model", ["plain", "tied", "frozen", "buffers"])
@pytest.mark.parametrize("pieces", [2, 4])
def test_another_order_of_addition_is_equal(model, pieces):
    """The tolerance is wide enough for what ranks cannot avoid: sums in another order."""
    whole = Recipe(model=model, max_norm=0.1, steps=10)
    split = train_plain(evolve(whole, microbatches=pieces))
    weights = dict(split.weights)
    if model == "buffers":  # it counts its forwards, of which there are more
        weights["forwards"] = train_plain(whole).weights["forwards"]
    assert_parity([evolve(split, weights=weights)], train_plain(whole), whole)


def test_gradient_that_is_wrong_by_a_little_is_not_equal():
    expected = train_plain(Recipe())
    found = train_plain(Recipe(decay=1 + 1e-4))
    with pytest.raises(ParityError, match="largest value"):
        assert_parity([evolve(found, losses=expected.losses)], expected, Recipe())


@pytest.mark.parametrize(
    ("what", "change", "message"),
    [
        ("losses", lambda v: (v[0], v[1] * (1 + 3 * TOLERANCE)), "losses differ .* in step 1"),
        ("losses", lambda v: (math.nan, v[1]), "losses differ .* in step 0: .* found nan"),
        ("norms", lambda v: (v[0] * (1 - 3 * TOLERANCE), v[1]), "norms differ .* in step 0"),
        ("evaluations", lambda v: v[:1], "evaluations: expected 2 values, found 1"),
    ],
)
def test_values_that_differ_are_named(what, change, message):
    expected = train_plain(RECIPE)
    found = evolve(expected, **{what: change(getattr(expected, what))})
    assert_parity([expected], expected, RECIPE)
    with pytest.raises(ParityError, match=f"rank 1, model plain, steps 2, .*: {message}"):
        assert_parity([expected, found], expected, RECIPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t + 3 * TOLERANCE * t.abs().max(), "most does head.bias, by 3"),
        (lambda t: t * math.nan, "most does head.bias, by inf"),
        (lambda t: t.double(), "head.bias: expected dtype torch.float32, found torch.float64"),
        (lambda t: t[1:], "head.bias: expected shape"),
        (lambda t: torch.nn.Parameter(t), "expected a plain tensor, found a Parameter"),
    ],
)
def test_weights_that_differ_are_named(change, message):
    expected = train_plain(RECIPE)
    weights = dict(expected.weights) | {"head.bias": change(expected.weights["head.bias"])}
    with pytest.raises(ParityError, match=message):
        assert_parity([evolve(expected, weights=weights)], expected, RECIPE)


def test_weights_are_not_judged_under_adamw():
    recipe = evolve(RECIPE, optimizer="adamw")
    expected = train_plain(recipe)
    assert_parity([evolve(expected, weights={})], expected, recipe)


def test_names_that_differ_are_named():
    weights = train_plain(RECIPE).weights
    other = {name.replace("head.bias", "module.head.bias"): t for name, t in weights.items()}
    with pytest.raises(ParityError, match=r"missing are \['head.bias'\], .*\['module.head.bias'\]"):
        assert_same_weights(other, weights)
