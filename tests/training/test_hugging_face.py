"""A model of transformers, from a folder, is trained like the command's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyshard.config.structuring import KeyPathError, structure
from polyshard.conformance import RankPool
from polyshard.processes.process_group import RankInfo
from polyshard.training.config import TrainingConfig
from polyshard.training.jobs import run
from polyshard.training.model import build_model

transformers = pytest.importorskip("transformers", reason="needs the extra polyshard[hf]")

LENGTH = 16
TINY: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a tiny Llama with tied embeddings."""
    torch.manual_seed(3)
    save(tmp_path, tie_word_embeddings=True)
    return tmp_path


def save(folder: Path, **options: Any) -> None:
    (folder / "text.txt").write_text("It was the best of times, it was the worst. " * 5)
    config = transformers.LlamaConfig(**(TINY | options))
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def config_of(
    folder: Path, distributed: object = None, *, cp_size: int = 1, **model: Any
) -> TrainingConfig:
    values = {
        "distributed": distributed,
        "parallelism": {"cp_size": cp_size},
        "model": {"hf": str(folder), **model},
        "data": {"path": str(folder / "text.txt"), "sequence_length": LENGTH},
        "steps": 3,
        "batch_size": 4,
    }
    return structure(values, TrainingConfig)


def losses(folder: Path, distributed: object, cp_size: int = 1) -> list[float]:
    config = config_of(folder, distributed, cp_size=cp_size)
    joined = dist.is_initialized()
    place = RankInfo(
        rank=dist.get_rank() if joined else 0,
        world_size=dist.get_world_size() if joined else 1,
        device=torch.device("cpu"),
    )
    arguments = {"config": config.to_dict(), "weights": None}
    found: list[float] = run(arguments, place, lambda step: None)["losses"]
    return found


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"strategy": "ddp"}, marks=pytest.mark.strategy("ddp"), id="ddp"),
        pytest.param(
            {"strategy": "fsdp2", "mp_policy": None},
            marks=pytest.mark.strategy("fsdp2"),
            id="fsdp2",
        ),
        pytest.param(
            {"strategy": "megatron_fsdp"},
            marks=pytest.mark.strategy("megatron_fsdp"),
            id="megatron_fsdp",
        ),
    ],
)
def test_it_trains_as_one_process_does(
    ranks: RankPool, folder: Path, strategy: dict[str, object]
) -> None:
    expected = losses(folder, None)
    assert expected[-1] < expected[0]
    for found in ranks.run(losses, folder, strategy):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.strategy("fsdp2")
def test_it_trains_on_parts_of_sequences(ranks: RankPool, folder: Path) -> None:
    strategy = {"strategy": "fsdp2", "mp_policy": None, "activation_checkpointing": True}
    for found in ranks.run(losses, folder, strategy, cp_size=2):
        assert found == pytest.approx(losses(folder, None), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("Mistral", {"sliding_window": LENGTH // 2}, "one with a window of 8; leave cp_size out"),
        ("Bloom", {"n_layer": 1, "n_head": 2}, "takes position_ids .* Bloom"),
    ],
)
def test_a_model_that_cannot_train_on_parts_is_refused(
    tmp_path: Path, kind: str, options: dict[str, Any], problem: str
) -> None:
    getattr(transformers, f"{kind}Config")(**TINY, **options).save_pretrained(tmp_path)
    with pytest.raises(KeyPathError, match=problem):
        build_model(config_of(tmp_path, "fsdp2", cp_size=2))


def test_it_has_the_weights_of_the_folder_in_float32(folder: Path) -> None:
    model: Any = build_model(config_of(folder))
    saved = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in saved.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.float())
        assert model.get_parameter(name).dtype == torch.float32


def test_a_folder_without_weights_gives_a_model_by_the_seed(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    one, same = build_model(config_of(folder)), build_model(config_of(folder))
    for mine, theirs in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_no_folder_of_a_causal_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyPathError, match=r"model.hf: expected a folder with a causal language"):
        build_model(config_of(tmp_path / "none"))
    transformers.T5Config(d_model=16).save_pretrained(tmp_path)
    with pytest.raises(KeyPathError, match=r"model.hf: expected a folder with a causal language"):
        build_model(config_of(tmp_path))


def test_too_few_tokens_or_places_are_refused(tmp_path: Path) -> None:
    save(tmp_path, vocab_size=200)
    with pytest.raises(KeyPathError, match=r"vocabulary of at least 256, .* found 200"):
        build_model(config_of(tmp_path))
    save(tmp_path, max_position_embeddings=8)
    with pytest.raises(KeyPathError, match=r"sequences of 16, .* found one for 8 at most"):
        build_model(config_of(tmp_path))


def test_a_shape_beside_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyPathError, match="expected no layers beside the model of"):
        config_of(tmp_path, layers=2)
