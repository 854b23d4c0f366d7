"""Both halves of the experts' MLP in one kernel that waits inside itself."""

from typing import Any

import pytest
import torch

from kernels import moe_fused, tuning
from kernels.launch import arrival_counters, recording
from kernels.norm import Normed
from kernels.opset import opset
from tests.kernels.helpers import TRITON, assert_close, randn

EPS = 1e-6
#: tokens, hidden, intermediate, experts, experts a token
SHAPES = [(1, 200, 40, 12, 3), (4, 200, 40, 12, 3), (5, 72, 24, 6, 2), (8, 130, 33, 9, 4)]
CONFIGS = {
    "loops-over-hidden": {"block_i": 8, "block_h": 64, "block_o": 4, "block_d": 64, "unroll": 2},
    "loops-over-inter": {"block_i": 4, "block_h": 256, "block_o": 8, "block_d": 16, "unroll": 4},
    "all-experts-at-once": {"block_i": 2, "block_h": 256, "block_o": 2, "block_d": 64, "unroll": 8},
}


def _inputs(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, ...]:
    tokens, hidden, inter, experts, top_k = shape
    weight, expert = torch.rand(tokens, experts).softmax(-1).topk(top_k, dim=-1)
    return (
        randn(device, dtype, tokens, hidden),
        1 + randn(device, dtype, hidden, scale=0.2),
        EPS,
        randn(device, dtype, experts, 2 * inter, hidden, scale=hidden**-0.5),
        randn(device, dtype, experts, hidden, inter, scale=inter**-0.5),
        weight.to(device),
        expert.to(device),
    )


def _forced(name: str) -> Any:
    return tuning.forced(moe_fused.OP, {"enabled": 1, "num_warps": 4} | CONFIGS[name])


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_reference_and_leaves_the_counters_at_zero(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    config: str,
    with_residual: bool,
) -> None:
    inputs = _inputs(device, dtype, shape)
    residual = randn(device, dtype, *shape[:2]) if with_residual else None
    wanted = opset("reference").norm_moe_add(*inputs, residual)
    # the second call finds the counters as the first left them
    for _ in range(2):
        with _forced(config):
            assert_close(TRITON.norm_moe_add(*inputs, residual), wanted)
    assert not arrival_counters(device, 64)[:64].any()


def test_the_result_may_replace_the_residual_and_x(device: torch.device) -> None:
    x, *rest = _inputs(device, torch.float32, SHAPES[1])
    wanted = opset("reference").norm_moe_add(x.clone(), *rest, x.clone())
    with _forced("loops-over-hidden"):
        TRITON.norm_moe_add(x, *rest, x, out_TH=x)
    assert_close(x, wanted)


def test_it_takes_the_norm_as_it_is_handed_on(device: torch.device) -> None:
    x, gain, *rest = _inputs(device, torch.float32, SHAPES[1])
    normed = Normed(x * gain, torch.stack([x[:, :70], x[:, 70:140]]).square().sum(-1))
    normed.squares_NT[1] += x[:, 140:].square().sum(-1)
    with _forced("loops-over-hidden"):
        got = TRITON.norm_moe_add(x, gain, *rest, x, normed=normed)
    assert_close(got, opset("reference").norm_moe_add(x, gain, *rest, x))


def test_all_tokens_on_the_same_experts(device: torch.device) -> None:
    *inputs, expert = _inputs(device, torch.float32, SHAPES[3])
    inputs.append(expert[:1].expand(8, -1).contiguous())
    with _forced("all-experts-at-once"):
        got = TRITON.norm_moe_add(*inputs, None)
    assert_close(got, opset("reference").norm_moe_add(*inputs, None))


@pytest.mark.parametrize(("tokens", "kernels"), [(8, 1), (9, 2)])
def test_more_tokens_than_it_serves_take_two_kernels(tokens: int, kernels: int) -> None:
    meta = torch.device("meta")
    shape = (tokens, 200, 40, 12, 3)
    inputs = [
        value.to(meta) if isinstance(value, torch.Tensor) else value
        for value in _inputs(torch.device("cpu"), torch.float32, shape)
    ]
    with _forced("loops-over-hidden"), recording() as launches:
        TRITON.norm_moe_add(*inputs, None)
    mine = [launch for launch in launches if launch.kernel.__name__ == "moe_fused_kernel"]
    assert len(mine) == (kernels == 1)
    assert len(launches) >= kernels
