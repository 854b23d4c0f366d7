"""The output projection with the router in the same kernel, and the norm it hands on."""

from typing import Any

import pytest
import torch

from kernels import linear_route, tuning
from kernels.norm import Normed
from kernels.opset import opset
from tests.kernels.helpers import TRITON, assert_close, randn

EPS = 1e-6
#: tokens, inputs, outputs, experts, experts a token
SHAPES = [(1, 96, 200, 12, 3), (3, 90, 200, 12, 3), (16, 120, 136, 24, 8)]
SCORES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "raw": {"renormalize": False},
}


def _inputs(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    tokens, inputs, outputs, experts, _ = shape
    return {
        "x": randn(device, dtype, tokens, inputs),
        "weight": randn(device, dtype, outputs, inputs, scale=inputs**-0.5),
        "residual": randn(device, dtype, tokens, outputs),
        "norm": 1 + randn(device, dtype, outputs, scale=0.2),
        "router": randn(device, dtype, experts, outputs, scale=outputs**-0.5),
        "bias": randn(device, torch.float32, experts),
    }


@pytest.mark.parametrize(
    ("shape", "score", "with_residual", "with_bias"),
    [
        ((1, 96, 200, 12, 3), "softmax", True, False),
        ((1, 96, 200, 12, 3), "sigmoid", False, True),
        ((1, 70, 90, 128, 8), "softmax", True, True),
        ((2, 70, 90, 200, 9), "softmax", True, False),
        ((2, 70, 90, 200, 9), "sigmoid", True, True),
        ((3, 90, 200, 12, 3), "softmax", False, False),
        ((3, 90, 200, 12, 3), "raw", True, True),
        ((3, 90, 200, 12, 12), "raw", True, False),
        ((16, 120, 136, 24, 8), "sigmoid", True, False),
    ],
    ids=str,
)
def test_it_equals_the_two_ops(
    device: torch.device,
    shape: tuple[int, ...],
    score: str,
    with_residual: bool,
    with_bias: bool,
) -> None:
    i = _inputs(device, torch.float32, shape)
    args = (i["x"], i["weight"], i["residual"] if with_residual else None, i["norm"], EPS,
            i["router"], shape[4])  # fmt: skip
    given = SCORES[score] | {"bias_E": i["bias"] if with_bias else None}
    total, weight, expert, normed = TRITON.linear_route(*args, **given)
    wanted = opset("reference").linear_route(*args, **given)
    assert_close(total, wanted.total_TO)
    assert torch.equal(expert, wanted.expert_TK)
    torch.testing.assert_close(weight, wanted.weight_TK, rtol=2e-5, atol=2e-5)
    norm_ref = opset("reference").rms_norm(wanted.total_TO, i["norm"], EPS)
    torch.testing.assert_close(_product_of(normed), norm_ref, rtol=2e-5, atol=2e-5)


def _product_of(normed: Normed) -> torch.Tensor:
    hidden = normed.weighted_TH.shape[1]
    scale_T = torch.rsqrt(normed.squares_NT.sum(0) / hidden + EPS)
    return normed.weighted_TH.float() * scale_T[:, None]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_chooses_well_for_the_stream_it_leaves(
    device: torch.device, shape: tuple[int, ...]
) -> None:
    i = _inputs(device, torch.bfloat16, shape)
    args = (i["x"], i["weight"], i["residual"], i["norm"], EPS, i["router"], shape[4])
    total, weight, expert, normed = TRITON.linear_route(*args)
    assert_close(total, opset("reference").linear_add(i["x"], i["weight"], i["residual"]))
    wanted_normed = opset("reference").rms_norm(total, i["norm"], EPS)
    torch.testing.assert_close(_product_of(normed), wanted_normed.float(), rtol=2e-2, atol=2e-2)
    probability = (wanted_normed.float() @ i["router"].float().T).softmax(-1)
    chosen = probability.gather(1, expert)
    best = probability.topk(shape[4], dim=-1).values
    # a near-tie may fall either way: no expert left out is clearly better than one taken
    assert bool((chosen.amin(1) > best[:, -1] * 0.97).all())
    torch.testing.assert_close(weight, chosen / chosen.sum(-1, keepdim=True), rtol=0.03, atol=5e-3)


@pytest.mark.parametrize(
    "config",
    [
        {"block_o": 16, "block_k": 32, "split_k": 1, "stages": 2, "swap": 0, "num_warps": 4},
        {"block_o": 32, "block_k": 16, "split_k": 4, "stages": 3, "swap": 0, "num_warps": 4},
        {"block_o": 64, "block_k": 32, "split_k": 2, "stages": 2, "swap": 1, "num_warps": 8},
        {
            "block_t": 8,
            "block_o": 16,
            "block_k": 32,
            "split_k": 4,
            "stages": 2,
            "swap": 1,
            "num_warps": 1,
        },
        {
            "block_t": 8,
            "block_o": 16,
            "block_k": 16,
            "ways": 4,
            "split_k": 1,
            "stages": 2,
            "swap": 1,
            "num_warps": 4,
        },
        {
            "block_t": 8,
            "block_o": 32,
            "block_k": 16,
            "ways": 2,
            "split_k": 2,
            "stages": 2,
            "swap": 1,
            "num_warps": 2,
        },
    ],
    ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items() if k in ("block_o", "split_k")),
)
def test_every_split_gives_the_same_and_leaves_the_counters_at_zero(
    device: torch.device, config: dict[str, int]
) -> None:
    i = _inputs(device, torch.float32, (5, 100, 200, 12, 3))
    args = (i["x"], i["weight"], i["residual"], i["norm"], EPS, i["router"], 3)
    wanted = opset("reference").linear_route(*args)
    with tuning.forced("linear_route", {"vector": 0} | config):
        # the second call finds the counters as the first left them
        for _ in range(2):
            total, weight, expert, _ = TRITON.linear_route(*args)
            assert_close(total, wanted.total_TO)
            assert torch.equal(expert, wanted.expert_TK)
            torch.testing.assert_close(weight, wanted.weight_TK, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "experts"), [(linear_route.MAX_TOKENS + 1, 12), (2, linear_route.MAX_EXPERTS + 4)]
)
def test_more_than_one_kernel_can_serve_takes_two(
    device: torch.device, tokens: int, experts: int
) -> None:
    i = _inputs(device, torch.float32, (tokens, 40, 72, experts, 2))
    args = (i["x"], i["weight"], i["residual"], i["norm"], EPS, i["router"], 2)
    total, _, expert, normed = TRITON.linear_route(*args)
    wanted = opset("reference").linear_route(*args)
    assert normed is None
    assert_close(total, wanted.total_TO)
    assert torch.equal(expert, wanted.expert_TK)


_GATE_UP = {
    "pair": {"vector": 1, "block_i": 8, "block_h": 64, "num_warps": 4},
    "shared": {"vector": 2, "block_i": 8, "block_h": 256, "num_warps": 4},
    "matrix": {"vector": 0, "block_t": 16, "block_i": 32, "block_h": 64, "stages": 2, "swap": 0,
               "num_warps": 4},
    "swapped": {"vector": 0, "block_t": 16, "block_i": 32, "block_h": 64, "stages": 2, "swap": 1,
                "num_warps": 4},
}  # fmt: skip


@pytest.mark.parametrize("norm_first", [0, 1])
@pytest.mark.parametrize("kernel", _GATE_UP)
def test_the_experts_take_the_norm_as_it_is_handed_on(
    device: torch.device, kernel: str, norm_first: int
) -> None:
    tokens, hidden, inter, experts, top_k = 5, 200, 40, 12, 3
    x, residual = (randn(device, torch.float32, tokens, hidden) for _ in range(2))
    gain = 1 + randn(device, torch.float32, hidden, scale=0.2)
    gate_up = randn(device, torch.float32, experts, 2 * inter, hidden, scale=hidden**-0.5)
    down = randn(device, torch.float32, experts, hidden, inter, scale=inter**-0.5)
    weight, expert = torch.rand(tokens, experts).softmax(-1).topk(top_k, dim=-1)
    args = (x, gain, EPS, gate_up, down, weight.to(device), expert.to(device), residual)
    parts = torch.stack([part.square().sum(-1) for part in x.split(70, dim=1)])  # type: ignore[no-untyped-call]
    normed = Normed(x * gain, parts)
    with tuning.forced("moe_gate_up", _GATE_UP[kernel] | {"norm_first": norm_first}):
        got = TRITON.norm_moe_add(*args, normed=normed)
    assert_close(got, opset("reference").norm_moe_add(*args))
    with pytest.raises(ValueError, match="the normed rows"):
        TRITON.norm_moe_add(*args, normed=Normed(normed.weighted_TH[:, :-1], parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router": (12, 72)}, "do not fit"),
        ({"weight": (200, 97)}, "do not fit"),
    ],
    ids=["router", "weight"],
)
def test_sizes_that_do_not_fit_are_refused(
    device: torch.device, change: dict[str, tuple[int, int]], message: str
) -> None:
    i = _inputs(device, torch.float32, (2, 96, 200, 12, 3))
    i |= {name: torch.zeros(size, device=device) for name, size in change.items()}
    with pytest.raises(ValueError, match=message):
        TRITON.linear_route(i["x"], i["weight"], None, i["norm"], EPS, i["router"], 3)
    with pytest.raises(ValueError, match="top_k must be in"):
        TRITON.linear_route(i["x"], i["weight"], None, i["norm"], EPS, i["router"], 13)


def test_the_vector_kernel_is_for_one_token(device: torch.device) -> None:
    i = _inputs(device, torch.float32, (2, 96, 200, 12, 3))
    args = (i["x"], i["weight"], None, i["norm"], EPS, i["router"], 3)
    config = {"vector": 1, "block_o": 8, "block_k": 64, "num_warps": 2}
    with (
        tuning.forced("linear_route", config),
        pytest.raises(ValueError, match="takes one token, got 2"),
    ):
        TRITON.linear_route(*args)
