"""Models of transformers: reloaded inside rebuild, re-tied, and trained as a plain process would.

They are tiny, with random weights, and nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from polyshard import full_state_dict, maybe_shard_optimizer, parallelize, rebuild, resolve_config
from polyshard.conformance import RankPool

transformers = pytest.importorskip("transformers", reason="needs the extra polyshard[hf]")

VOCABULARY, LENGTH, BATCH, STEPS = 64, 8, 4, 2

CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "zero 0": {"strategy": "megatron_fsdp", "zero_dp_strategy": 0},
    "zero 1": {"strategy": "megatron_fsdp", "zero_dp_strategy": 1},
    "zero 2": {"strategy": "megatron_fsdp", "zero_dp_strategy": 2},
    "zero 3": {"strategy": "megatron_fsdp", "zero_dp_strategy": 3},
}

decoder = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": decoder,
    "qwen2": decoder,
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("reload", ["load", "assign", "replace"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.strategy(config["strategy"]))
        for name, config in CONFIGS.items()
    ],
)
def test_training_after_reload(
    ranks: RankPool, tmp_path: Path, strategy: str, name: str, reload: str
) -> None:
    build(name, seed=1).save_pretrained(tmp_path)
    losses, weights = train_plain(name, tmp_path)
    for found, found_weights, tied in ranks.run(train, CONFIGS[strategy], name, tmp_path, reload):
        assert tied
        assert found == pytest.approx(losses, rel=1e-6)
        assert found_weights.keys() == weights.keys()
        for key, value in weights.items():
            torch.testing.assert_close(found_weights[key], value, rtol=0, atol=1e-6)


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **MODELS[name])
    kind = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
    model: nn.Module = getattr(transformers, kind).from_config(config)
    return model.train()


def train_plain(name: str, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Train what is in the folder, after steps whose only trace is the optimizer's momentum."""
    model = build(name, seed=0)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [step(model, optimizer, number, rank=0, size=1) for number in range(STEPS)]
    model.load_state_dict(saved(model, folder).state_dict())
    losses += [step(model, optimizer, STEPS + n, rank=0, size=1) for n in range(STEPS)]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def train(
    config: dict[str, Any], name: str, folder: Path, reload: str
) -> tuple[list[float], dict[str, Tensor], bool]:
    distributed = resolve_config(config).in_full_precision()
    module: Any = build(name, seed=0)
    model, _ = parallelize(module, distributed)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = maybe_shard_optimizer(model, optimizer)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = [step(model, optimizer, number, rank, size) for number in range(STEPS)]
    with rebuild(model):
        take(module, saved(module, folder), reload)
        module.tie_weights()
    losses += [step(model, optimizer, STEPS + n, rank, size) for n in range(STEPS)]
    tied = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    return losses, full_state_dict(model, rank0_only=False), tied


def saved(like: Any, folder: Path) -> nn.Module:
    """Return what ``from_pretrained`` makes of the folder."""
    for parent in type(like).__mro__:
        # A strategy may have put a class of its own before the model's.
        if parent.__module__.startswith("transformers."):
            model: nn.Module = parent.from_pretrained(folder)  # type: ignore[attr-defined]
            return model
    raise AssertionError("expected a model of transformers")


def take(module: nn.Module, new: nn.Module, reload: str) -> None:
    """Give a model the weights of another by one of the ways that scripts know."""
    if reload != "replace":
        module.load_state_dict(new.state_dict(), assign=reload == "assign")
        return
    for name, parameter in new.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, size: int
) -> float:
    """Take a step on this rank's share of a batch and return the loss over the whole batch."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    share = tokens.chunk(size)[rank]
    optimizer.zero_grad()
    loss = model(input_ids=share, labels=share).loss
    loss.backward()
    optimizer.step()
    total = loss.detach().double()
    if size > 1:
        dist.all_reduce(total)
    return total.item() / size
