"""What the tests of faults compare: megatron-fsdp by itself, and through Polyshard.

Tests find this module by the folder, which they add to ``sys.path``: ranks import it too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from polyshard import accumulate, parallelize
from polyshard.conformance.models import Block, build_model, global_batch, loss_of
from polyshard_megatron_fsdp import MegatronFSDPConfig, fully_shard_optimizer
from polyshard_megatron_fsdp.megatron_fsdp.patches.cuda_shim import prepare

REPLICAS = {"dp_replicate": 2, "dp_shard": 2}


class Polyshard:
    """megatron-fsdp through Polyshard."""

    def wrap(self, model: nn.Module, stage: int, mesh: Any = None, **options: Any) -> Any:
        """Return the wrapped model."""
        config = MegatronFSDPConfig(zero_dp_strategy=stage, **options)
        return parallelize(model, config, mesh=mesh)[0]

    def shard(self, model: Any, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step."""
        return fully_shard_optimizer(model, optimizer)

    def backward(self, model: Any, batches: list[Tensor]) -> None:
        """Accumulate the gradients of microbatches, as the documentation says."""
        for index, tokens in enumerate(batches):
            with accumulate(model, last=index + 1 == len(batches)):
                (loss_of(model, tokens) / len(batches)).backward()


class Bare:
    """megatron-fsdp by itself, with no more around it than running without CUDA takes."""

    def wrap(self, model: nn.Module, stage: int, mesh: Any = None, **options: Any) -> Any:
        """Return the wrapped model."""
        from megatron_fsdp import fully_shard_model

        prepare(torch.device("cpu"))
        mesh = mesh or mesh_of({"dp": dist.get_world_size(), "tp": 1})
        names = mesh.mesh_dim_names
        dimensions = {"dp_shard_dim": next(n for n in ("dp_shard", "dp") if n in names)}
        if "dp_replicate" in names:
            both = mesh[("dp_replicate", "dp_shard")]
            dimensions |= {
                "dp_outer_dim": "dp_replicate",
                "hybrid_fsdp_group": both._flatten("hybrid").get_group(),
            }
        wrapped = fully_shard_model(
            model,
            device_mesh=mesh,
            tp_dim="tp",
            fsdp_unit_modules=[Block],
            zero_dp_strategy=stage,
            device=torch.device("cpu"),
            **dimensions,
            **options,
        )
        # gloo has no reduction that scales.
        wrapped.ddp_config.gradient_reduce_div_fusion = False
        return wrapped

    def shard(self, model: Any, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to step."""
        from megatron_fsdp import fully_shard_optimizer

        return fully_shard_optimizer(optimizer)

    def backward(self, model: Any, batches: list[Tensor]) -> None:
        """Accumulate the gradients of microbatches with the defaults."""
        for tokens in batches:
            (loss_of(model, tokens) / len(batches)).backward()


Subject = Polyshard | Bare


def mesh_of(dimensions: dict[str, int]) -> Any:
    return init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def share(tokens: Tensor) -> Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def gradient_sum(model: Any) -> float:
    """Return the sum of all gradients' absolute values, over all ranks but not replicas."""
    from polyshard.strategies import fallback

    model._replace_param_with_distributed_if_needed()
    return float(fallback.clip_grad_norm(model, float("inf"), 1.0))


def plain_gradient_sum(name: str = "plain") -> float:
    model = build_model(name)
    loss_of(model, global_batch(0)).backward()
    return sum(float(p.grad.abs().sum()) for p in model.parameters())
