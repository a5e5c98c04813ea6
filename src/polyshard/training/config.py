"""What one training run is: the schema of the file that ``polyshard train`` reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from attrs import Attribute, field, fields, frozen

from polyshard.config.base import DistributedConfig
from polyshard.config.fields import is_int, is_number, is_one_of, is_str, optional
from polyshard.config.files import ConfigSource, KeyPath, read_config
from polyshard.config.parallelism import ParallelismSizes
from polyshard.config.structuring import KeyPathError, UnknownKeyError, unstructure
from polyshard.exceptions import ConfigError, MeshError, PolyshardError
from polyshard.processes.process_group import LONGEST_TIMEOUT
from polyshard.registry.resolve import check_parallelism, resolve_config

__all__ = ["DataConfig", "ModelConfig", "OptimizerConfig", "TrainingConfig", "read_run"]

_SIZES = tuple(size.name for size in fields(ParallelismSizes))


def _divides_width(instance: ModelConfig, attribute: Attribute[int], value: int) -> None:
    if instance.width % value:
        raise ConfigError(
            f"expected a number of heads that divides the width, found {value} heads for a "
            f"width of {instance.width}"
        )


def _has_its_own_shape(
    instance: ModelConfig, attribute: Attribute[str | None], value: str | None
) -> None:
    shape = fields(ModelConfig)[:3]
    given = [f.name for f in shape if getattr(instance, f.name) != f.default]
    if value is not None and given:
        raise ConfigError(
            f"expected no {given[0]} beside the model of {value!r}, which has a shape of its own; "
            "leave it out"
        )


@frozen(kw_only=True)
class ModelConfig:
    """The shape of the transformer, which reads bytes, or the folder of another model.

    Attributes:
        layers: Number of blocks.
        width: Size of the hidden state, a multiple of ``heads``.
        heads: Attention heads.
        hf: Folder of a causal language model of Hugging Face, relative to the working directory,
            that is trained instead; its shape is its own, and dropout is off. Needs the extra
            ``polyshard[hf]``.
    """

    layers: int = field(default=4, validator=is_int(1))
    width: int = field(default=192, validator=is_int(1))
    heads: int = field(default=4, validator=[is_int(1), _divides_width])
    hf: str | None = field(default=None, validator=[optional(is_str), _has_its_own_shape])


@frozen(kw_only=True)
class DataConfig:
    """The text that the model learns.

    Attributes:
        path: A text file of any encoding, since the model reads bytes; relative to the working
            directory. None is a short English text that comes with the package.
        sequence_length: Bytes that the model sees of one sequence.
    """

    path: str | None = field(default=None, validator=optional(is_str))
    sequence_length: int = field(default=64, validator=is_int(1))


@frozen(kw_only=True)
class OptimizerConfig:
    """How the weights are updated.

    Attributes:
        name: ``"sgd"`` or ``"adamw"``.
        lr: Learning rate (default: 0.02 for SGD, 0.001 for AdamW).
        momentum: Of SGD; AdamW has none.
        weight_decay: Fraction of each weight that is taken away per unit of learning rate.
    """

    name: str = field(default="sgd", validator=is_one_of("sgd", "adamw"))
    lr: float = field(validator=is_number(0, exclusive=True))
    momentum: float = field(default=0.9, validator=is_number(0))
    weight_decay: float = field(default=0.0, validator=is_number(0))

    @lr.default
    def _usual_lr(self) -> float:
        return 0.001 if self.name == "adamw" else 0.02


def read_run(path: Path, assignments: Iterable[str] = ()) -> ConfigSource:
    """Read the file of a run, with ``key=value`` pairs set, for ``TrainingConfig``.

    A strategy's name may stand for its mapping, and sizes wherever the class says.

    Raises:
        ConfigError: As ``read_config``, ``ConfigSource.assign`` and ``ConfigSource.move`` do.
    """
    source = read_config(path).expand("distributed", "strategy")
    for assignment in assignments:
        source = source.assign([assignment]).expand("distributed", "strategy")
    return source.move(TrainingConfig.elsewhere)


def _to_distributed(value: object) -> DistributedConfig | None:
    """Resolve what a file says of the strategy; errors get the key under which it stands."""
    if value is None:
        return None
    try:
        return resolve_config(value)  # type: ignore[arg-type]
    except UnknownKeyError as error:
        sizes = _SIZES if len(error.path) == 1 else ()
        path = ("distributed", *error.path)
        raise UnknownKeyError(error.cls, error.key, path, beside=sizes) from error
    except KeyPathError as error:
        raise KeyPathError(error.problem, ("distributed", *error.path)) from error
    except PolyshardError as error:
        raise KeyPathError(str(error), ("distributed", "strategy")) from error


@frozen(kw_only=True)
class TrainingConfig:
    """One run: a model, a text, an optimizer and a strategy.

    Attributes:
        distributed: The strategy's config, or a mapping with its name under ``"strategy"``. None
            is plain PyTorch in one process.
        parallelism: How many ranks each kind of parallelism has; what is left out of ``dp_size``
            is inferred. A file may have the sizes under ``distributed`` as well. ``cp_size``
            divides ``data.sequence_length``.
        model: Shape of the model, or its folder.
        data: The text.
        optimizer: How the weights are updated.
        steps: Optimizer steps.
        batch_size: Sequences in one step, over all ranks and microbatches.
        microbatches: Parts into which each rank divides its share of a batch, to add up their
            gradients.
        max_grad_norm: Global norm to which gradients are clipped; None leaves them alone.
        seed: Of the initial weights and of the order of the text.
        timeout_minutes: How long a collective may wait for a rank, in every process group; None is
            10 minutes.
        elsewhere: Where else in a file a value may stand -> its own place.
    """

    elsewhere: ClassVar[Mapping[KeyPath, KeyPath]] = {
        ("distributed", size): ("parallelism", size) for size in _SIZES
    }

    distributed: DistributedConfig | None = field(converter=_to_distributed)
    parallelism: ParallelismSizes = field(factory=ParallelismSizes)
    model: ModelConfig = field(factory=ModelConfig)
    data: DataConfig = field(factory=DataConfig)
    optimizer: OptimizerConfig = field(factory=OptimizerConfig)
    steps: int = field(default=20, validator=is_int(1))
    batch_size: int = field(default=8, validator=is_int(1))
    microbatches: int = field(default=1, validator=is_int(1))
    max_grad_norm: float | None = field(
        default=None, validator=optional(is_number(0, exclusive=True))
    )
    seed: int = field(default=0, validator=is_int(0))
    timeout_minutes: float | None = field(
        default=None, validator=optional(is_number(0, LONGEST_TIMEOUT, exclusive=True))
    )

    def __attrs_post_init__(self) -> None:
        """Refuse sizes that the strategy does not support, or that cannot divide a sequence."""
        if self.distributed is not None:
            try:
                check_parallelism(self.distributed, self.parallelism)
            except MeshError as error:
                size = () if error.field is None else (error.field,)
                raise KeyPathError(str(error), ("parallelism", *size)) from error
        if self.data.sequence_length % self.parallelism.cp_size:
            raise KeyPathError(
                f"expected a multiple of the {self.parallelism.cp_size} context-parallel ranks, "
                f"found {self.data.sequence_length}",
                ("data", "sequence_length"),
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the whole config as plain values, from which it can be structured again."""
        distributed = None if self.distributed is None else self.distributed.to_dict()
        return {**unstructure(self), "distributed": distributed}

    def check_shares(self, world_size: int) -> None:
        """Raise unless so many ranks have the sizes asked for and can divide a batch evenly.

        Raises:
            KeyPathError: The sizes do not multiply to the ranks, or shares would differ in size,
                so that their mean would not be the batch's.
        """
        try:
            shares = self.parallelism.resolve(world_size).dp_size or 1
        except MeshError as error:
            raise KeyPathError(str(error), ("parallelism",)) from error
        parts = shares * self.microbatches
        if self.batch_size % parts:
            raise KeyPathError(
                f"expected a multiple of {parts} ({shares} data-parallel ranks x "
                f"{self.microbatches} microbatches), found {self.batch_size}",
                ("batch_size",),
            )
