"""Parts that need no model: shared-memory collectives, placement, tree selection, head shares."""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.collectives import HostGroup, serve_store
from engine.config import SpeculationConfig
from engine.graphs import SegmentTimes
from engine.placement import cpus_of_rank, parse_cpu_list
from engine.policy import Policies
from engine.shared_memory import PART_BYTES, SharedMemoryGroup, region_bytes
from engine.tree import _grown, _select
from engine.weights import RandomSource, Rank
from kernels.launch import pdl_for

_LARGE = PART_BYTES // 4 + 1000


def _rank_main(rank: int, tp: int, fd: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    group = SharedMemoryGroup(fd, rank, tp, timeout_s=200)
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 37, _LARGE):
            x = _part(rank, count, dtype)
            group.all_reduce(x)
            # numpy has no bfloat16; fp32 holds the same bits
            out[f"{dtype}-{count}"] = x.float().numpy()
    orders = []
    for number in range(200):
        message = torch.full((8,), number if rank == 0 else -1)
        group.broadcast(message)
        orders.append(int(message[3]))
    out["orders"] = orders
    gathered = group.gather(torch.full((3, 2), float(rank)))
    out["gathered"] = None if gathered is None else gathered.tolist()
    pipe.send(out)


def _part(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    draws = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=draws).to(dtype)


@pytest.mark.parametrize("tp", [2, 3])
def test_one_shot_sums_are_right_and_the_same_bits_on_all_ranks(tp: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, region_bytes(tp))
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for rank in range(tp):
        ours, theirs = context.Pipe()
        child = context.Process(target=_rank_main, args=(rank, tp, fd, theirs))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    outputs = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join(20)
    os.close(fd)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 37, _LARGE):
            got = [out[f"{dtype}-{count}"] for out in outputs]
            assert all(np.array_equal(got[0], g) for g in got)
            exact = sum(_part(r, count, dtype).double() for r in range(tp))
            torch.testing.assert_close(torch.from_numpy(got[0]).to(dtype), exact.to(dtype))
    assert all(out["orders"] == list(range(200)) for out in outputs)
    assert [out["gathered"] is None for out in outputs] == [r > 0 for r in range(tp)]
    assert outputs[0]["gathered"] == [[[float(r)] * 2] * 3 for r in range(tp)]


def _host_main(rank: int, port: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timeout)
    group = HostGroup(store, rank, 2, 60)
    x = _part(rank, 37, torch.bfloat16)
    group.all_reduce(x)
    tree = torch.arange(6).view(2, 3) * (1 - rank)
    group.broadcast(tree)
    gathered = group.gather(torch.full((2,), rank))
    all_of = group.all_gather(torch.tensor([[0.5, -1.5]]) * (rank + 1))
    pipe.send((x.float().numpy(), tree.tolist(), gathered is None, all_of.tolist()))


def test_tensors_that_travel_through_the_host_arrive() -> None:
    store, port = serve_store(2, 60)
    # fork would copy the store's threads in an unknown state
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        child = context.Process(target=_host_main, args=(rank, port, theirs))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    first, second = (pipe.recv() for pipe in pipes)
    for child in children:
        child.join(20)
    del store
    exact = sum(_part(r, 37, torch.bfloat16).double() for r in range(2)).to(torch.bfloat16)
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[0], exact.float().numpy())
    assert first[1] == second[1] == [[0, 1, 2], [3, 4, 5]]
    assert (first[2], second[2]) == (False, True)
    assert first[3] == second[3] == [[[0.5, -1.5]], [[1.0, -3.0]]]


def test_a_rank_that_never_comes_is_a_timeout() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, region_bytes(2))
    group = SharedMemoryGroup(fd, 0, 2, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"rank 1 did not arrive within 0.2 s"):
        group.all_reduce(torch.ones(4))
    os.close(fd)


@pytest.mark.parametrize(
    ("rank", "tp", "allowed", "nodes", "node", "expected"),
    [
        pytest.param(1, 2, range(4), [range(4)], None, {2, 3}, id="one-node-split"),
        pytest.param(2, 4, range(8), [range(4), range(4, 8)], None, {4, 5}, id="two-nodes"),
        pytest.param(3, 4, range(2), [range(2)], None, {1}, id="fewer-cpus-than-ranks"),
        pytest.param(0, 2, range(8), [range(4), range(4, 8)], 1, {4, 5, 6, 7}, id="gpu-node"),
        pytest.param(0, 1, [1], [range(4)], None, {1}, id="affinity-respected"),
    ],
)
def test_ranks_are_placed(
    rank: int, tp: int, allowed: Any, nodes: Any, node: int | None, expected: set[int]
) -> None:
    assert cpus_of_rank(rank, tp, set(allowed), [set(n) for n in nodes], node) == expected


def test_cpu_lists_are_parsed() -> None:
    assert parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpu_list("") == set()


def _spec(steps: int, topk: int, draft_tokens: int) -> SpeculationConfig:
    return SpeculationConfig(method="eagle3", steps=steps, topk=topk, draft_tokens=draft_tokens)


def test_the_best_nodes_are_kept_with_their_ancestors_and_ranks() -> None:
    """Candidates 0, 1 below the root; 2, 3 below 1; 4, 5 below 0 (expanded best first)."""
    token = torch.tensor([[10, 11, 20, 21, 30, 31]])
    score = torch.tensor([[-2.0, -0.1, -0.2, -3.0, -2.1, -9.0]])
    parent = torch.tensor([[-1, -1, 1, 1, 0, 0]])
    tree = _select(torch.tensor([7]), token, score, parent, _spec(2, 2, 5))
    assert tree.token_BT.tolist() == [[7, 10, 11, 20, 30]]
    assert tree.parent_BT.tolist() == [[-1, 0, 0, 2, 1]]
    assert tree.rank_BT.tolist() == [[0, 0, 1, 0, 0]]


def test_equal_scores_keep_the_ancestor() -> None:
    """Certain tokens: parent and child both score log 1; the child alone would be an orphan."""
    token, parent = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[-1, -1, 0, 0, 1, 1]])
    score = torch.tensor([[0.0, -50.0, 0.0, -50.0, -50.0, -50.0]])
    tree = _select(torch.tensor([9]), token, score, parent, _spec(2, 2, 3))
    assert tree.token_BT.tolist() == [[9, 1, 3]]
    assert tree.parent_BT.tolist() == [[-1, 0, 1]]


def test_a_new_level_sees_its_own_ancestors_only() -> None:
    eye = torch.eye(2, dtype=torch.bool)[None]
    two = _grown(eye, torch.tensor([[1, 1]]), eye)
    three = _grown(two, torch.tensor([[1, 0]]), eye)
    assert three[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
        [0, 1, 0, 1, 1, 0],
        [0, 1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("tp", [1, 2, 3, 8])
def test_shares_of_the_head_cover_the_vocabulary_once(tp: int) -> None:
    spans = [Rank(r, tp).vocab_span(203) for r in range(tp)]
    assert [t for start, stop in spans for t in range(start, stop)] == list(range(203))
    assert max(b - a for a, b in spans) - min(b - a for a, b in spans) <= 1


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        pytest.param(2, [(0, 2), (2, 4)], id="split"),
        pytest.param(4, [(0, 1), (1, 2), (2, 3), (3, 4)], id="one-each"),
        pytest.param(8, [(h, h + 1) for h in (0, 0, 1, 1, 2, 2, 3, 3)], id="copies"),
    ],
)
def test_key_heads_are_shared_or_copied(tp: int, expected: list[tuple[int, int]]) -> None:
    assert [Rank(r, tp).kv_span(4) for r in range(tp)] == expected


def test_random_weights_depend_on_name_and_seed_only() -> None:
    make: Callable[[int], RandomSource] = lambda seed: RandomSource(  # noqa: E731
        {"a": (6, 4), "b": (6, 4), "norm": (4,)}, seed, torch.device("cpu")
    )
    assert torch.equal(make(1).read("a")[2:5], make(1).read_rows("a", 2, 5))
    assert not torch.equal(make(1).read("a"), make(1).read("b"))
    assert not torch.equal(make(1).read("a"), make(2).read("a"))
    assert torch.equal(make(1).read("norm"), torch.ones(4))


@pytest.mark.parametrize(
    ("alone", "router", "rows", "joined", "early"),
    [
        pytest.param(
            True, None, 1, False, {"linear_add", "moe_down"}, id="one-row-apart-and-early"
        ),
        pytest.param(True, None, 4, True, {"moe_down"}, id="four-rows-joined"),
        pytest.param(True, None, 16, True, set(), id="sixteen-joined"),
        pytest.param(True, None, 64, False, set(), id="many-rows-plain"),
        pytest.param(True, "joined", 1, True, {"linear_add", "moe_down"}, id="joined-by-variable"),
        pytest.param(True, "joined", 17, False, set(), id="more-than-it-serves"),
        pytest.param(True, "split", 4, False, {"moe_down"}, id="split-by-variable"),
        pytest.param(False, "joined", 4, False, set(), id="ranks-sum-in-between"),
    ],
)
def test_kernels_are_launched_as_measured_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    alone: bool,
    router: str | None,
    rows: int,
    joined: bool,
    early: set[str],
) -> None:
    monkeypatch.delenv("AUTOTUNE_PDL", raising=False)
    if router is not None:
        monkeypatch.setenv("AUTOTUNE_ROUTER", router)
    policies = Policies(alone=alone)
    assert policies.joins_router(rows) is joined
    meta = torch.device("meta")
    with policies.launching(rows):
        ops = ("linear_add", "linear_route", "norm_linear", "moe_down")
        assert {op for op in ops if pdl_for(meta, op)} == early
    assert not pdl_for(meta, "linear_add")


def test_a_variable_decides_which_kernels_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_PDL", "norm_linear")
    with Policies(alone=True).launching(1):
        assert pdl_for(torch.device("meta"), "norm_linear")
        assert not pdl_for(torch.device("meta"), "linear_add")
    monkeypatch.setenv("AUTOTUNE_ROUTER", "both")
    with pytest.raises(ValueError, match="AUTOTUNE_ROUTER='both': must be one of auto, joined"):
        Policies(alone=True)


def test_cycles_go_singly_only_where_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentTimes, "_event", staticmethod(lambda: None))
    times, flight, singles, measured = SegmentTimes(torch.device("cuda")), 8, 0, []
    for _ in range(60):
        alone = times.singles(flight)
        assert (alone == 0) == (times.quiet() >= flight)
        for _ in range(alone):
            measured.append(times.start_cycles(1))
        singles += alone
        assert times.quiet() >= flight
        times.start_cycles(flight)
    assert measured.count("timed") == times.num_timed >= 10
    assert measured.count("laps") >= times.num_timed // 2
    assert singles <= 4 * times.num_timed
    assert SegmentTimes(torch.device("cpu")).singles(flight) == 0
