"""ParallelismSizes: in how many parts each kind of parallelism divides the ranks."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from attrs import evolve, field, frozen

from polyshard.config.fields import is_int, optional
from polyshard.exceptions import MeshError

__all__ = ["MeshAxisName", "ParallelismSizes"]


class MeshAxisName(StrEnum):
    """The names of mesh dimensions. Members equal their strings."""

    PP = "pp"
    DP = "dp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    DP_SHARD_CP = "dp_shard_cp"
    DP_CP = "dp_cp"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    EP_SHARD = "ep_shard"


@frozen(kw_only=True)
class ParallelismSizes:
    """In how many parts each kind of parallelism divides the ranks.

    The sizes multiply to the number of ranks. ``dp_size`` counts all data-parallel ranks and
    may be left out, to be inferred; ``dp_replicate_size`` says how many replicas they form
    (HSDP), each of ``dp_size / dp_replicate_size`` ranks that share one copy.

    Attributes:
        dp_size: Data-parallel ranks; None infers them from the number of ranks.
        dp_replicate_size: Replicas among them; None or 1 is a single one.
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline-parallel ranks.
        cp_size: Context-parallel ranks.
        ep_size: Expert-parallel ranks.
    """

    dp_size: int | None = field(default=None, validator=optional(is_int(1)))
    dp_replicate_size: int | None = field(default=None, validator=optional(is_int(1)))
    tp_size: int = field(default=1, validator=is_int(1))
    pp_size: int = field(default=1, validator=is_int(1))
    cp_size: int = field(default=1, validator=is_int(1))
    ep_size: int = field(default=1, validator=is_int(1))

    def resolve(self, world_size: int) -> Self:
        """Return the sizes with ``dp_size`` filled in, checked against the number of ranks.

        Raises:
            MeshError: They do not multiply to it; the message names each size.
        """
        others = self.tp_size * self.pp_size * self.cp_size * self.ep_size
        dp_size = world_size // others if self.dp_size is None else self.dp_size
        replicas = self.dp_replicate_size or 1
        if dp_size * others != world_size or dp_size % replicas != 0:
            raise MeshError(
                f"expected sizes that multiply to the {world_size} ranks of the job, with "
                f"dp_replicate_size dividing dp_size; found {self._listed()}"
            )
        return evolve(self, dp_size=dp_size)

    def _listed(self) -> str:
        return (
            f"dp_size={self.dp_size}, dp_replicate_size={self.dp_replicate_size}, "
            f"tp_size={self.tp_size}, pp_size={self.pp_size}, cp_size={self.cp_size}, "
            f"ep_size={self.ep_size}"
        )

    def axes(self) -> dict[MeshAxisName, int]:
        """Return the mesh dimensions of resolved sizes, outermost first.

        Dimensions of size 1 are left out, except that data parallelism always has one.
        """
        if self.dp_size is None:
            raise MeshError("expected resolved sizes, found dp_size=None; call resolve() first")
        replicas = self.dp_replicate_size or 1
        axes = {MeshAxisName.PP: self.pp_size}
        if replicas > 1:
            axes[MeshAxisName.DP_REPLICATE] = replicas
            axes[MeshAxisName.DP_SHARD] = self.dp_size // replicas
        else:
            axes[MeshAxisName.DP] = self.dp_size
        axes |= {
            MeshAxisName.EP: self.ep_size,
            MeshAxisName.CP: self.cp_size,
            MeshAxisName.TP: self.tp_size,
        }
        always = (MeshAxisName.DP, MeshAxisName.DP_SHARD)
        return {name: size for name, size in axes.items() if size > 1 or name in always}
