"""Models of transformers and peft generate under each strategy as in one process.

They are tiny, with random weights, and nothing is downloaded.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from polyshard import full_state_dict, maybe_shard_optimizer, parallelize, resolve_config
from polyshard.conformance import RankPool

transformers = pytest.importorskip("transformers", reason="needs the extra polyshard[hf]")

CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "zero 0": {"strategy": "megatron_fsdp", "zero_dp_strategy": 0},
    "zero 1": {"strategy": "megatron_fsdp", "zero_dp_strategy": 1},
    "zero 2": {"strategy": "megatron_fsdp", "zero_dp_strategy": 2},
    "zero 3": {"strategy": "megatron_fsdp", "zero_dp_strategy": 3},
}

each_config = pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=n, marks=pytest.mark.strategy(c["strategy"])) for n, c in CONFIGS.items()],
)


def build(adapted: bool) -> Any:
    """Return a Llama, with adapters of peft around its projections if asked."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
    )
    if adapted:
        import peft

        settings = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            model = peft.get_peft_model(model, settings)  # it asks transformers by an old name
    return model


def prompt(rank: int) -> Tensor:
    return torch.randint(1, 64, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))


def generate(model: Any, rank: int) -> Tensor:
    """Generate for each rank's own prompt, and for longer on each rank."""
    tokens: Tensor = model.generate(
        input_ids=prompt(rank),
        max_new_tokens=2 + 3 * rank,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    return tokens


def train_and_generate(model: Any, optimizer: Any, ranks: list[int]) -> list[Tensor]:
    """Generate before, between and after two steps on the prompts of some ranks."""
    found = []
    for _ in range(2):
        model.eval()
        found += [generate(model, rank) for rank in ranks]
        model.train()
        losses = [model(input_ids=prompt(rank), labels=prompt(rank)).loss for rank in ranks]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found + [generate(model, rank) for rank in ranks]


def trained(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def run_under(config: dict[str, Any], adapted: bool) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    model: Any
    model, _ = parallelize(build(adapted), resolve_config(config).in_full_precision())
    optimizer = maybe_shard_optimizer(model, SGD(trained(model), lr=0.5))
    found = train_and_generate(model, optimizer, [dist.get_rank()])
    return found, full_state_dict(model, rank0_only=False), model.config.vocab_size


@each_config
@pytest.mark.world_size(2)
@pytest.mark.parametrize("adapted", [False, True], ids=["llama", "llama with lora"])
def test_generate_equals_one_process(
    ranks: RankPool, config: dict[str, Any], adapted: bool
) -> None:
    if adapted:
        pytest.importorskip("peft")
    outcomes = ranks.run(run_under, config, adapted)
    plain = build(adapted)
    expected = train_and_generate(plain, SGD(trained(plain), lr=0.5), list(range(len(outcomes))))
    for rank, (found, weights, vocabulary) in enumerate(outcomes):
        for tokens, wanted in zip(found, expected[rank :: len(outcomes)], strict=True):
            assert torch.equal(tokens, wanted)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
        assert vocabulary == 64
