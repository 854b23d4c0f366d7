"""Ranks on GPUs over pinned memory: what goes through the box, and what by the carrier."""

import multiprocessing
import os
from typing import Any

import pytest
import torch

from engine.pinned import MESSAGE_BYTES, PinnedGroup


class _Carrier:
    """Two ranks' carrier that only notes what it was asked to carry."""

    tp = 2

    def __init__(self, rank: int) -> None:
        self.rank, self.carried = rank, []

    def all_reduce(self, x: torch.Tensor) -> None:
        self.carried.append(("all_reduce", x.numel()))

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        self.carried.append(("gather", x.numel()))
        return None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.carried.append(("all_gather", x.numel()))
        return x[None]

    def broadcast(self, x: torch.Tensor) -> None:
        self.carried.append(("broadcast", x.numel()))

    def broadcast_host(self, x: torch.Tensor) -> None:
        self.carried.append(("broadcast_host", x.numel()))


def _rank_main(rank: int, fd: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    carrier = _Carrier(rank)
    group = PinnedGroup(carrier, fd, torch.device("cpu"))
    x = torch.tensor([0.5, 2.0]) * (rank + 1)
    group.all_reduce(x)
    tree = torch.arange(6).view(2, 3) * (1 - rank)
    group.broadcast(tree)
    gathered = group.gather(torch.tensor([rank, 7]))
    all_of = group.all_gather(torch.tensor([[0.5, -1.5]]).T.expand(2, 2) * (rank + 1))
    large = torch.zeros(MESSAGE_BYTES // 4 + 1)
    for call in (group.all_reduce, group.gather, group.all_gather, group.broadcast):
        call(large)
    group.broadcast_host(torch.zeros(3, dtype=torch.int64))
    found = None if gathered is None else gathered.tolist()
    pipe.send((x.tolist(), tree.tolist(), found, all_of.tolist(), carrier.carried))


def test_small_messages_go_through_the_box_and_the_rest_by_the_carrier() -> None:
    fd = os.memfd_create("test")
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        child = context.Process(target=_rank_main, args=(rank, fd, theirs))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        outputs = [pipe.recv() if pipe.poll(60) else pytest.fail("no answer") for pipe in pipes]
    finally:
        for child in children:
            child.kill()
            child.join(20)
        os.close(fd)
    rows = [[0.5, 0.5], [-1.5, -1.5]]
    for x, tree, _, all_of, carried in outputs:
        assert x == [1.5, 6.0]
        assert tree == [[0, 1, 2], [3, 4, 5]]
        assert all_of == [rows, [[2 * v for v in row] for row in rows]]
        names = ("all_reduce", "gather", "all_gather", "broadcast")
        size = MESSAGE_BYTES // 4 + 1
        assert carried == [*((name, size) for name in names), ("broadcast_host", 3)]
    assert [out[2] for out in outputs] == [[[0, 7], [1, 7]], None]
