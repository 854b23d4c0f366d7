"""The experts' MLP: every way a program finds its rows, both schemes of the second half."""

from contextlib import ExitStack

import pytest
import torch

from kernels import tuning
from kernels.launch import recording
from kernels.moe_rows import sorted_tiles
from kernels.opset import opset
from tests.kernels.helpers import REFERENCE, TRITON, assert_close, assert_same, randn

HIDDEN, INTER, TOP_K = 40, 24, 3
Layer = tuple[torch.Tensor, torch.Tensor]


def layer(device: torch.device, dtype: torch.dtype, experts: int) -> Layer:
    return (
        randn(device, dtype, experts, 2 * INTER, HIDDEN, scale=HIDDEN**-0.5),
        randn(device, dtype, experts, HIDDEN, INTER, scale=INTER**-0.5),
    )


def routing(device: torch.device, tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    return REFERENCE.route(randn(device, torch.float32, tokens, experts), TOP_K)


@pytest.mark.parametrize(
    ("tokens", "experts", "dtype"),
    [
        pytest.param(1, 12, torch.float32, id="vector"),
        pytest.param(1, 4, torch.bfloat16, id="vector-bf16"),
        pytest.param(3, 12, torch.float32, id="slot-per-pair"),
        pytest.param(6, 5, torch.bfloat16, id="slot-per-expert-bf16"),
        pytest.param(18, 4, torch.float32, id="grouped-two-blocks-of-rows"),
        pytest.param(180, 4, torch.bfloat16, id="sorted-bf16"),
    ],
)
def test_moe_mlp_equals_reference(
    device: torch.device, dtype: torch.dtype, tokens: int, experts: int
) -> None:
    x = randn(device, dtype, tokens, HIDDEN)
    assert_same("moe_mlp", x, *layer(device, dtype, experts), *routing(device, tokens, experts))


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.float32), (4, torch.bfloat16), (17, torch.float32)]
)
def test_norm_and_residual_equal_reference(
    device: torch.device, dtype: torch.dtype, tokens: int
) -> None:
    x, norm = randn(device, dtype, tokens, HIDDEN), randn(device, dtype, HIDDEN)
    weights, route = layer(device, dtype, 4), routing(device, tokens, 4)
    assert_same("norm_moe_add", x, norm, 1e-6, *weights, *route, x)


MATRIX = {"vector": 0, "block_t": 16, "block_i": 16, "block_h": 32, "stages": 2, "num_warps": 2}
DOWN = {
    "vector-unrolled": (1, {"scheme": 0, "block_o": 4, "block_i": 16, "unroll": 4, "num_warps": 1}),
    "stationary": (5, {"scheme": 1, "block_o": 16, "block_i": 16, "split": 1, "stages": 2,
                       "num_warps": 2}),
    "stationary-split": (16, {"scheme": 1, "block_o": 32, "block_i": 16, "split": 4, "stages": 2,
                              "num_warps": 2}),
    "stationary-one-token": (1, {"scheme": 1, "block_o": 16, "block_i": 32, "split": 2,
                                 "stages": 2, "num_warps": 2}),
    "vector-four-tokens": (4, {"scheme": 0, "block_o": 4, "block_i": 32, "unroll": 2,
                               "num_warps": 1}),
    "across": (4, {"scheme": 4, "block_o": 4, "block_i": 16, "unroll": 2, "num_warps": 2}),
    "across-one-token": (1, {"scheme": 4, "block_o": 8, "block_i": 32, "unroll": 4,
                             "num_warps": 4}),
    "shared": (6, {"scheme": 3, "block_o": 8, "block_i": 32, "num_warps": 1}),
    "grouped-swapped": (7, {"scheme": 2, "block_t": 16, "block_o": 64, "block_i": 16, "stages": 3,
                            "swap": 1, "num_warps": 4}),
    "grouped-few": (5, {"scheme": 2, "block_t": 16, "block_o": 32, "block_i": 16, "stages": 2,
                        "num_warps": 2}),
}  # fmt: skip


GATE_UP = {
    "matrix": MATRIX,
    "matrix-swapped": dict(MATRIX, block_i=64, swap=1, norm_first=1, num_warps=4),
    "pair": {"vector": 1, "block_i": 4, "block_h": 32, "num_warps": 1},
    "shared": {"vector": 2, "block_i": 4, "block_h": 64, "num_warps": 2},
    "shared-norm-first": {"vector": 2, "block_i": 8, "block_h": 64, "norm_first": 1,
                          "num_warps": 1},
}  # fmt: skip


@pytest.mark.parametrize("first", list(GATE_UP))
@pytest.mark.parametrize("name", list(DOWN))
def test_every_scheme_gives_the_same(device: torch.device, name: str, first: str) -> None:
    tokens, second = DOWN[name]
    x, norm = randn(device, torch.float32, tokens, HIDDEN), randn(device, torch.float32, HIDDEN)
    weights, route = layer(device, torch.float32, 7), routing(device, tokens, 7)
    with ExitStack() as stack:
        stack.enter_context(tuning.forced("moe_gate_up", GATE_UP[first]))
        stack.enter_context(tuning.forced("moe_down", second))
        assert_same("norm_moe_add", x, norm, 1e-6, *weights, *route, x)


@pytest.mark.parametrize(
    ("op", "config", "message"),
    [
        ("moe_gate_up", {"vector": 2, "block_i": 4, "block_h": 32, "num_warps": 1}, "32 of 40"),
        ("moe_down", {"scheme": 3, "block_o": 4, "block_i": 16, "num_warps": 1}, "16 of 24"),
    ],
    ids=["gate-up", "down"],
)
def test_sharing_refuses_parts_of_rows(op: str, config: dict[str, int], message: str) -> None:
    device = torch.device("meta")
    expert = torch.empty(2, TOP_K, dtype=torch.int64, device=device)
    with tuning.forced(op, config), recording(), pytest.raises(ValueError, match=message):
        TRITON.moe_mlp(
            torch.empty(2, HIDDEN, device=device),
            torch.empty(5, 2 * INTER, HIDDEN, device=device),
            torch.empty(5, HIDDEN, INTER, device=device),
            torch.empty(2, TOP_K, device=device),
            expert,
        )


def test_all_tokens_on_the_same_experts(device: torch.device) -> None:
    x = randn(device, torch.float32, 20, HIDDEN)
    weight = torch.full((20, TOP_K), 1 / TOP_K, device=device)
    expert = torch.tensor([4, 0, 2], device=device).repeat(20, 1)
    assert_same("moe_mlp", x, *layer(device, torch.float32, 5), weight, expert)


def test_the_reference_equals_a_loop_over_tokens_in_every_size_class() -> None:
    torch.manual_seed(3)
    device = torch.device("cpu")
    for tokens, experts in ((1, 8), (9, 8), (400, 40)):
        gate_up, down = layer(device, torch.float32, experts)
        weight, expert = routing(device, tokens, experts)
        x = torch.randn(tokens, HIDDEN)
        wanted = torch.zeros_like(x)
        for t in range(tokens):
            for k in range(TOP_K):
                e = expert[t, k]
                gate, up = (gate_up[e] @ x[t]).chunk(2)
                wanted[t] += weight[t, k] * (down[e] @ (torch.nn.functional.silu(gate) * up))
        got = REFERENCE.moe_mlp(x, gate_up, down, weight, expert)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-6)


def test_sorted_tiles_cover_every_pair_once() -> None:
    torch.manual_seed(5)
    expert = torch.rand(90, 7).topk(3).indices
    expert[:40, 0] = 6
    slots = sorted_tiles(expert, 9, 16)
    seen: list[int] = []
    for tile in range(slots.count):
        owner, first, count = (
            int(t[tile]) for t in (slots.tile_expert, slots.tile_first, slots.tile_count)
        )
        if owner < 0:
            continue
        pairs = slots.order[first : first + count]
        assert 1 <= count <= 16
        assert set(expert.flatten()[pairs.long()].tolist()) == {owner}
        seen += pairs.tolist()
    assert sorted(seen) == list(range(expert.numel()))


def test_the_residual_may_be_written_over(device: torch.device) -> None:
    x, norm = randn(device, torch.float32, 4, HIDDEN), randn(device, torch.float32, HIDDEN)
    weights, route = layer(device, torch.float32, 6), routing(device, 4, 6)
    wanted = REFERENCE.norm_moe_add(x, norm, 1e-6, *weights, *route, x)
    got = TRITON.norm_moe_add(x, norm, 1e-6, *weights, *route, x, x)
    assert got.data_ptr() == x.data_ptr()
    assert_close(x, wanted)


def test_shapes_that_do_not_fit_are_refused() -> None:
    gate_up, down = layer(torch.device("cpu"), torch.float32, 4)
    weight, expert = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    x = torch.zeros(2, HIDDEN)
    moe_mlp = opset("triton").moe_mlp
    with pytest.raises(ValueError, match=r"gate_up \[4, 48, 40\] and down \[4, 40, 23\]"):
        moe_mlp(x, gate_up, down[:, :, 1:], weight, expert)
    with pytest.raises(ValueError, match=r"x \[1, 40\]"):
        moe_mlp(x[:1], gate_up, down, weight, expert)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16"):
        moe_mlp(x.bfloat16(), gate_up, down, weight, expert)
