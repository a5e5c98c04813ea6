"""What is measured of a process."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from polyshard.training.measure import optimizer_bytes, peak_rss_bytes


def test_the_peak_remembers_memory_that_was_given_back() -> None:
    before = peak_rss_bytes()
    block = bytearray(256 * 1024**2)
    block[::4096] = b"x" * len(block[::4096])
    del block
    assert peak_rss_bytes() > before + 100 * 1024**2


def test_the_peak_is_not_that_of_the_process_before_it() -> None:
    block = bytearray(2 * 1024**3)  # more than torch, whose files count as well, may ever take
    block[::4096] = b"x" * len(block[::4096])
    measure = "from polyshard.training.measure import peak_rss_bytes; print(peak_rss_bytes())"
    child = subprocess.run([sys.executable, "-c", measure], capture_output=True, check=True)
    assert int(child.stdout) < len(block)


def test_the_state_of_an_optimizer_is_counted() -> None:
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert optimizer_bytes(optimizer) == 0
    model(torch.ones(10)).sum().backward()
    optimizer.step()
    assert optimizer_bytes(optimizer) == 10 * 10 * 4
