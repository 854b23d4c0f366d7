"""What ends a cycle, and the head's small ops: kernels equal to their references."""

import pytest
import torch

from kernels.cycle import LEFT, MAX_FORCED_NODES
from kernels.opset import opset
from tests.kernels.helpers import (
    REFERENCE,
    TRITON,
    assert_close,
    assert_same,
    clone,
    randn,
)

#: a bush, a chain, and a tree whose first children are not its first nodes
PARENTS = [[-1, 0, 0, 1, 2, 2, 4], [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 3, 2]]
DEPTHS = [[0, 1, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 1, 1, 2, 2, 3, 2]]


def _state(device: torch.device, capacity: int = 300) -> torch.Tensor:
    """The engine's whole matrix, of which a batch is the first columns; some have nothing left."""
    whole = torch.randint(1, 90, (4, capacity))
    whole[LEFT] = torch.randint(-1, 5, (capacity,))
    return whole.to(device)


def assert_same_in_place(name: str, *args: torch.Tensor | float | None, at: int) -> None:
    """As ``assert_same``; argument ``at`` is the state, given as columns of a wider matrix."""
    left = []
    for ops in (REFERENCE, TRITON):
        own = [clone(arg) for arg in args]
        whole = own[at]
        rows = own[0].shape[0]
        getattr(ops, name)(*own[:at], whole[:, :rows], *own[at + 1 :])
        left.append([arg for arg in own if isinstance(arg, torch.Tensor)])
    for wanted, got in zip(*left, strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_finish_equals_reference(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    x = randn(device, dtype, rows, 64)
    if rows > 1:
        x[1] = float("nan")
    # wide logits, so that rounding cannot swap the best two
    weight = randn(device, dtype, 300, 64, scale=4.0)
    assert_same_in_place(
        "finish",
        x,
        randn(device, dtype, 64),
        1e-6,
        weight,
        _state(device),
        torch.full((rows, 1), 7, device=device),
        randn(device, dtype, 300, 64),
        torch.empty(rows, 64, dtype=dtype, device=device),
        at=4,
    )


@pytest.mark.parametrize("forced", [False, True], ids=["judged", "synthetic"])
@pytest.mark.parametrize(("nodes", "longest"), [(1, 1), (2, 2), (7, 4), (7, 7), (65, 6)])
def test_settle_equals_reference(
    device: torch.device, nodes: int, longest: int, forced: bool
) -> None:
    rows = 5
    token, rank, target = torch.randint(0, 99, (3, rows, nodes))
    value = torch.randn(rows, nodes)
    value[2, -1] = float("inf")
    count = torch.randint(0, longest, (rows,))
    path = torch.randint(0, nodes, (rows, nodes))
    path[torch.arange(nodes)[None] > count[:, None]] = -1
    draw = torch.tensor([8], device=device) if forced else None
    assert_same_in_place(
        "settle",
        *(x.to(device) for x in (token, rank, path, count, torch.randint(0, 99, (rows,)), target)),
        value.to(device),
        _state(device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.full((rows, 2 * longest), 7, device=device),
        draw,
        9,
        at=7,
    )


@pytest.mark.parametrize("rates", [(1.0, 1.0, 0.0), (0.9, 0.5, 0.2), (0.0,)])
def test_force_equals_reference(device: torch.device, rates: tuple[float, ...]) -> None:
    token = torch.randint(0, 99, (3, 7))
    uniform = torch.rand(11, 40)
    draw, rate = torch.tensor([10]), torch.tensor(rates)
    args = (token, torch.tensor(PARENTS), torch.tensor(DEPTHS), uniform, draw, rate)
    assert_same("force", *(x.to(device) for x in args))


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_forced_verify_accepts_first_children_as_drawn(device: torch.device, name: str) -> None:
    ops = opset(name)
    token, parent, depth = torch.arange(21).view(3, 7), torch.tensor(PARENTS), torch.tensor(DEPTHS)
    uniform = torch.tensor([[0.5, 0.85, 0.1]])
    inputs = (token, parent, depth, uniform, torch.tensor([0]), torch.tensor([0.9, 0.7, 0.3]))
    judged = ops.force(*(x.to(device) for x in inputs))
    path, count, _ = ops.verify_greedy(token.to(device), parent.to(device), judged)
    assert count.tolist() == [2, 1, 3]
    assert path[0, :3].tolist() == [0, 1, 3]
    assert path[1, :2].tolist() == [0, 1]
    assert path[2, :4].tolist() == [0, 1, 3, 5]


def test_too_large_a_tree_is_refused(device: torch.device) -> None:
    token = torch.zeros(1, MAX_FORCED_NODES + 1, dtype=torch.int64, device=device)
    one = torch.zeros(1, 1, device=device)
    with pytest.raises(ValueError, match=f"at most {MAX_FORCED_NODES} nodes"):
        TRITON.force(token, token, token, one, token[0, :1], one[0])


@pytest.mark.parametrize(("rows", "hidden"), [(1, 128), (5, 96), (3, 2048)])
def test_draft_input_equals_reference(
    device: torch.device, dtype: torch.dtype, rows: int, hidden: int
) -> None:
    embed = randn(device, dtype, 17, hidden)
    wide = randn(device, dtype, rows, 2 * hidden)
    assert_same(
        "draft_input",
        torch.randint(0, 17, (rows,)).to(device),
        embed,
        wide[:, hidden:],
        randn(device, dtype, hidden),
        randn(device, dtype, hidden),
        1e-6,
    )


@pytest.mark.parametrize(("rows", "inter"), [(1, 64), (4, 1500), (3, 1024)])
def test_silu_product_equals_reference(
    device: torch.device, dtype: torch.dtype, rows: int, inter: int
) -> None:
    assert_same("silu_product", randn(device, dtype, rows, 2 * inter, scale=2.0))


@pytest.mark.parametrize(("nodes", "longest"), [(1, 1), (4, 4), (7, 3)])
def test_follow_equals_reference(
    device: torch.device, dtype: torch.dtype, nodes: int, longest: int
) -> None:
    rows = 3
    token, path = torch.randint(0, 99, (rows, nodes)), torch.randint(0, nodes, (rows, nodes))
    count = torch.tensor([0, longest - 1, longest // 2])
    path[torch.arange(nodes)[None] > count[:, None]] = -1
    assert_same(
        "follow",
        *(x.to(device) for x in (token, path, count, torch.tensor([100, 101, 102]))),
        randn(device, dtype, rows * nodes, 1100),
        longest,
    )


def test_pick_equals_reference(device: torch.device, dtype: torch.dtype) -> None:
    count = torch.tensor([2, 0, 1], device=device)
    assert_same("pick", randn(device, dtype, 9, 96), randn(device, dtype, 9, 40), count)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_verify_greedy_writes_where_it_is_told(device: torch.device, name: str) -> None:
    ops = opset(name)
    token, target = torch.randint(0, 2, (2, 3, 7))
    args = (token.to(device), torch.tensor(PARENTS, device=device), target.to(device))
    path = torch.full((3, 7), 9, device=device)
    count, following = torch.full((2, 3), 9, device=device)
    ops.verify_greedy(*args, out=(path, count, following))
    for got, wanted in zip((path, count, following), ops.verify_greedy(*args), strict=True):
        assert_close(got, wanted)
