"""A strategy that averages gradients, and that can be told to make one mistake.

Installed as a distribution of its own by test_suite.py, to see that the suite finds the mistake.
"""

from contextlib import contextmanager, nullcontext
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from polyshard import DistributedConfig, hookimpl
from polyshard.strategies import fallback

_kept = []
_paused = WeakKeyDictionary()  # whether a model's gradients wait for the last microbatch


@frozen(kw_only=True)
class FaultyConfig(DistributedConfig):
    strategy: ClassVar[str] = "faulty"

    fault: str = "none"


@hookimpl
def parallelize(config, model, mesh, optimizer):
    if config.fault != "leaves each rank its own weights":
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
    if config.fault != "leaves each rank its own buffers":
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    if config.fault == "drops attributes":
        for parameter in model.parameters():
            vars(parameter).clear()
    if config.fault == "casts a buffer":
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.float()
    if config.fault == "keeps all models":
        _kept.append(model)
    _paused[model] = False
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_reduction(config, model))
    if config.fault == "loads nothing":
        model.register_load_state_dict_pre_hook(lambda module, state, *_: state.clear())
    if config.fault == "averages after forward alone":
        model.embedding.register_forward_pre_hook(lambda *_: _paused.update({model: True}))
        model.register_forward_hook(lambda *_: _paused.update({model: False}))
    if config.fault == "drops the model's attributes":
        vars(model).pop("purpose")
    if config.fault == "evaluation clears gradients":
        model.register_forward_pre_hook(_clear_in_evaluation)
    return model, optimizer


def _reduction(config, model):
    reference = ref(model)

    def reduce(parameter):
        if not _paused[reference()]:
            _average(config, parameter)

    return reduce


def _average(config, parameter):
    dist.all_reduce(parameter.grad)
    if config.fault == "adds, averages not":
        return
    if config.fault == "averages all but one" and parameter.numel() == 33 * 16:
        return
    parameter.grad.div_(dist.get_world_size())


def _clear_in_evaluation(model, arguments):
    if not model.training:
        model.zero_grad()


@hookimpl
def shard_optimizer(config, model, optimizer):
    if config.fault == "takes a hidden step":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
    if config.fault == "makes one group":
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.param_groups = [optimizer.param_groups[0] | {"params": parameters}]
    if config.fault == "ignores the schedule":
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.register_step_pre_hook(lambda *_: _set_rates(optimizer, rates))
    if config.fault == "steps nothing":
        optimizer.param_groups[0]["params"] = []
    return optimizer


def _set_rates(optimizer, rates):
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@hookimpl
def accumulate(config, model, last):
    if config.fault == "never leaves a microbatch" and not last:
        _paused[model] = True
        return nullcontext()
    return _microbatch(config, model, last)


@contextmanager
def _microbatch(config, model, last):
    _paused[model] = True
    try:
        yield
    finally:
        _paused[model] = False
    if not last or config.fault == "forgets the last microbatch":
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            _average(config, parameter)


@hookimpl
def clip_grad_norm(config, model, max_norm, norm_type):
    if config.fault == "only measures":
        max_norm = float("inf")
    if config.fault == "clips always":
        max_norm = min(max_norm, 0.1)
    if config.fault == "knows the 2-norm alone":
        norm_type = 2.0
    norm = fallback.clip_grad_norm(model, max_norm, norm_type)
    return norm.clamp(max=max_norm) if config.fault == "returns the norm after" else norm


@hookimpl
def full_tensors(config, model):
    prefix = "module." if config.fault == "keeps a wrapper's prefix" else ""
    for name, value in fallback.full_tensors(model):
        if config.fault != "forgets a tied name" or name != "head.weight":
            yield prefix + name, value


@hookimpl
def pre_rebuild(model):
    return dict(model.named_parameters(remove_duplicate=False))


@hookimpl
def post_rebuild(config, model, snapshot):
    if config.fault == "leaves them alone":
        return
    for name, parameter in snapshot.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        new = getattr(module, attribute)
        if new is parameter:
            continue
        if config.fault == "restores old values":
            new.data.copy_(parameter)
        with torch.no_grad():
            parameter.copy_(new)
        if config.fault == "keeps stale attributes":
            vars(new).clear()
        vars(parameter).update(vars(new))
        if config.fault == "makes another parameter":
            parameter = nn.Parameter(parameter.detach(), parameter.requires_grad)
        setattr(module, attribute, parameter)
