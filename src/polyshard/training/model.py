"""A small decoder-only transformer over bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyshard.training.config import TrainingConfig
from polyshard.training.hugging_face import load_model

__all__ = ["Block", "Transformer", "build_model", "next_byte_loss", "position_ids_for"]

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to its normed input.

    No biases: they start at zero and stay so small that rounding alone would set them apart.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state, of the same shape: (batch, length, width)."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        update: Tensor = self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))
        return hidden + update

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(hidden).view(batch, length, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, size)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class Transformer(nn.Module):
    """Blocks between an embedding of bytes and a head that shares its weight.

    Args:
        layers: Number of blocks.
        width: Size of the hidden state.
        heads: Attention heads.
        length: Longest sequence that it takes.
    """

    #: What tensor parallelism splits: the feed-forward networks, each over its hidden features.
    _tp_plan: ClassVar[Mapping[str, str]] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, *, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the logits of the byte that follows each: (batch, length, 256).

        ``position_ids`` are the places of the tokens, of the same shape, where these are not a
        sequence from its start.
        """
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.position(position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def build_model(config: TrainingConfig) -> nn.Module:
    """Return the model of a run, with the weights of its folder or those that its seed gives.

    Raises:
        KeyPathError: The model of Hugging Face that the run names cannot be loaded or trained.
    """
    if config.model.hf is not None:
        return load_model(Path(config.model.hf), config, VOCABULARY)
    torch.manual_seed(config.seed)
    shape = config.model
    return Transformer(
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        length=config.data.sequence_length,
    )


def position_ids_for(inputs: Tensor, config: TrainingConfig) -> dict[str, Tensor]:
    """Return the arguments that tell a model where its inputs stand, each of their shape.

    There are none for whole sequences, whose places every model knows.
    """
    if config.parallelism.cp_size == 1:
        return {}
    places = {"position_ids": torch.arange(inputs.shape[1], device=inputs.device)}
    if config.model.hf is not None:
        # transformers takes a leap in the positions for another sequence, unless there is a mask.
        places["attention_mask"] = torch.ones_like(places["position_ids"])
    return {name: values.expand_as(inputs) for name, values in places.items()}


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor, **places: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of each byte given those before it.

    Args:
        model: What ``build_model`` returned, wrapped or not.
        inputs: Bytes of shape (batch, length).
        targets: The byte that follows each, of the same shape.
        **places: What ``position_ids_for`` returned.
    """
    output = model(inputs, **places)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
