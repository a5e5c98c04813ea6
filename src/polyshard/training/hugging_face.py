"""Causal language models of transformers, from a folder, as models that read bytes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyshard.config.structuring import KeyPathError

if TYPE_CHECKING:
    from polyshard.training.config import TrainingConfig

__all__ = ["load_model"]

_KEY = ("model", "hf")


def load_model(folder: Path, config: TrainingConfig, vocabulary: int) -> nn.Module:
    """Load the model that a run names, in float32 and without dropout; nothing is downloaded.

    Args:
        folder: What ``save_pretrained`` wrote, or only a ``config.json``, whose model gets
            initial weights from the seed.
        config: The run.
        vocabulary: Number of tokens that the text has.

    Raises:
        KeyPathError: transformers is not installed, the folder holds no causal language model,
            or one that does not take the text.
    """
    try:
        import transformers
    except ImportError as error:
        raise KeyPathError(
            "expected transformers to be installed for a model of Hugging Face, found that it "
            f"cannot be imported ({error}); run: pip install 'polyshard[hf]'",
            _KEY,
        ) from error
    torch.manual_seed(config.seed)
    try:
        shape = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _check(shape, config, vocabulary)
        shape.use_cache = False  # of no use here, and activation checkpoints would fill it again
        model = _build(transformers.AutoModelForCausalLM, folder, shape)
        if config.parallelism.cp_size > 1:
            _check_parts(model, shape, config)
    except (OSError, ValueError) as error:
        if isinstance(error, KeyPathError):
            raise
        raise KeyPathError(
            f"expected a folder with a causal language model, found {str(folder)!r}: {error}",
            _KEY,
        ) from error
    # Dropout differs from run to run and from rank to rank; what is trained here is compared.
    return model.eval()


def _build(factory: Any, folder: Path, shape: Any) -> nn.Module:
    model: nn.Module
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        model = factory.from_pretrained(
            folder, config=shape, dtype=torch.float32, local_files_only=True
        )
    else:
        model = factory.from_config(shape, dtype=torch.float32)
    return model


def _check(shape: Any, config: TrainingConfig, vocabulary: int) -> None:
    """Refuse a model that has fewer tokens or places than the text needs."""
    text = shape.get_text_config()
    if text.vocab_size < vocabulary:
        raise KeyPathError(
            f"expected a vocabulary of at least {vocabulary}, one token for each byte, found "
            f"{text.vocab_size}",
            _KEY,
        )
    places = getattr(text, "max_position_embeddings", None)
    if places is not None and places < config.data.sequence_length:
        raise KeyPathError(
            f"expected a model for sequences of {config.data.sequence_length}, as "
            f"data.sequence_length says, found one for {places} at most",
            _KEY,
        )


def _check_parts(model: nn.Module, shape: Any, config: TrainingConfig) -> None:
    """Refuse a model that would train differently on parts of a sequence."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise KeyPathError(
            f"expected a model that takes position_ids for parallelism.cp_size, found "
            f"{type(model).__name__}; leave cp_size out",
            _KEY,
        )
    window = getattr(shape.get_text_config(), "sliding_window", None)
    if window is not None and window < config.data.sequence_length:
        raise KeyPathError(
            "expected a model whose attention sees the whole sequence for parallelism.cp_size, "
            f"found one with a window of {window}; leave cp_size out, or choose a "
            "data.sequence_length of at most that",
            _KEY,
        )
