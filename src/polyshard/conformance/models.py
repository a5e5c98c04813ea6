"""Models small enough to train in a millisecond, each with one thing that strategies get wrong.

They predict the next token. Sizes do not divide evenly by 2 or 4 everywhere, and some parameters
have fewer rows than there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyshard.parameters.names import canonical_parameter_name

__all__ = [
    "BATCH",
    "MODELS",
    "Block",
    "TinyModel",
    "build_model",
    "global_batch",
    "inputs_and_targets",
    "loss_of",
    "loss_on",
    "stamp",
    "stamps_of",
    "tables_of_places",
]

VOCABULARY = 33
WIDTH = 16
HEAD_SIZE = 8
LENGTH = 9  # eight tokens and their successors, which several ranks can share
BLOCKS = 3

#: Sequences in one global batch: three microbatches of a size that 1, 2, 4 and 8 ranks share.
BATCH = 24


class Block(nn.Module):
    """A residual block, the unit that strategies wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, of the shape of ``hidden``: (batch, length, width)."""
        update: Tensor = self.down(F.silu(self.up(self.norm(hidden))))
        return hidden + self.gain * update


class TinyModel(nn.Module):
    """Embedding, three blocks in a ModuleList, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, *, adapt: bool = True) -> Tensor:
        """Return the logits of the next token at each place: (batch, length, vocabulary).

        ``adapt`` turns on the part of ``ModelWithAdapter`` that not every step uses.
        """
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if adapt:
            hidden = self.adapt(hidden)
        logits: Tensor = self.head(hidden)
        return logits

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the vectors of the tokens."""
        vectors: Tensor = self.embedding(tokens)
        return vectors

    def adapt(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` as it is; a model with an adapter changes it."""
        return hidden


class TiedModel(TinyModel):
    """The head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.embedding.weight = self.head.weight


class FrozenModel(TinyModel):
    """The embedding and the first block are not trained; the second block is, but for a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[1].get_parameter("up.weight").requires_grad_(False)


class ModelWithAdapter(TinyModel):
    """A part of it gets no gradient in a step that does not ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def adapt(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` with the adapter's contribution."""
        update: Tensor = self.adapter(hidden)
        return hidden + update


class ModelWithBuffers(TinyModel):
    """It computes with a persistent and a non-persistent buffer, and counts its forwards."""

    scale: Tensor
    positions: Tensor
    forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("positions", torch.randn(LENGTH, 1), persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the scaled vectors of the tokens, moved by their positions."""
        if self.training:
            self.forwards.add_(1)
        return super().embed(tokens) * self.scale + self.positions[: tokens.shape[1]]


class OddModel(TinyModel):
    """A model that is no chain of layers.

    Two blocks share a layer, the module that was registered last is used first, the model owns a
    parameter itself, has a hook, and returns a dict.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up
        self.gain = nn.Parameter(torch.ones(1))
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.register_forward_hook(lambda _, __, output: {"logits": output * 1.5})

    def embed(self, tokens: Tensor) -> Tensor:
        """Return mixed vectors of the tokens."""
        mixed: Tensor = self.mixer(super().embed(tokens))
        return mixed * self.gain


class AttentionBlock(Block):
    """A block with causal attention, in which only places of one sequence meet."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output, of the shape of ``hidden``: (batch, length, width)."""
        normed = self.attention_norm(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        update: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return super().forward(hidden + update)


class MixedModel(TiedModel):
    """Tied, frozen in parts, with a buffer and attention: for changes of parameters and layouts.

    Tensor parallelism divides its heads and features, context parallelism the places of a
    sequence.
    """

    _tp_plan: ClassVar[Mapping[str, str]] = MappingProxyType(
        {f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")}
        | {f"blocks.*.{name}": "rowwise" for name in ("output", "down")}
    )
    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(BLOCKS))
        self.blocks[0].requires_grad_(False)
        self.blocks[2].get_parameter("up.weight").requires_grad_(False)
        self.register_buffer("places", torch.rand(LENGTH - 1, WIDTH))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the vectors of the tokens, scaled by their places."""
        return super().embed(tokens) * self.places


#: The models by the name under which a ``Recipe`` asks for them.
MODELS: Mapping[str, Callable[[], TinyModel]] = MappingProxyType(
    {
        "plain": TinyModel,
        "tied": TiedModel,
        "frozen": FrozenModel,
        "adapter": ModelWithAdapter,
        "buffers": ModelWithBuffers,
        "odd": OddModel,
        "mixed": MixedModel,
    }
)


def build_model(name: str, *, seed: int = 0) -> TinyModel:
    """Build a model with weights that depend on the seed alone; the random state is left as is."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return MODELS[name]()


def stamp(model: nn.Module) -> None:
    """Set the attribute ``stamp`` on each Parameter, as scripts mark what is special about it."""
    for name, parameter in model.named_parameters():
        parameter.stamp = canonical_parameter_name(name)  # type: ignore[attr-defined]


def stamps_of(model: nn.Module) -> dict[str, str | None]:
    """Return the stamp that is found under each name of a Parameter, which is its first one."""
    return {
        canonical_parameter_name(name): getattr(parameter, "stamp", None)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def global_batch(step: int) -> Tensor:
    """Return the tokens of one step over all ranks: int64, (BATCH, length)."""
    generator = torch.Generator().manual_seed(1_000 + step)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def inputs_and_targets(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that a model sees and those that follow each: (batch, length - 1)."""
    return tokens[:, :-1], tokens[:, 1:]


def tables_of_places(model: nn.Module) -> list[Tensor]:
    """Return the buffers of a model, wrapped or not, that have a row for each place."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("places")]


def loss_on(model: nn.Module, inputs: Tensor, targets: Tensor, *, adapt: bool = True) -> Tensor:
    """Return the mean cross entropy of each target, a scalar."""
    output = model(inputs, adapt=adapt)
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else output
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of(model: nn.Module, tokens: Tensor, *, adapt: bool = True) -> Tensor:
    """Return the mean cross entropy of each next token, a scalar."""
    return loss_on(model, *inputs_and_targets(tokens), adapt=adapt)
