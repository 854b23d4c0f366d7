"""The fused ops chained into a forward, against the references' chain."""

from dataclasses import replace

import pytest
import torch

from kernels.catalog import ODD, QWEN3_30B_A3B
from kernels.forward import build_forward
from kernels.launch import programmatic_launch
from kernels.opset import opset

SMALL = replace(ODD, hidden=72, heads=4, head_size=16, experts=6, inter=24, vocab=90)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("size", [(1, 1), (2, 3)], ids=["one-token", "two-trees-of-three"])
def test_the_chain_equals_the_references_chain(
    device: torch.device, size: tuple[int, int], fused: bool
) -> None:
    forward = build_forward(SMALL, 2, size, 7, device, torch.float32)
    forward.fused = fused
    forward.run()
    got, token = forward.hidden, forward.token
    forward.ops = opset("reference")
    forward.run()
    torch.testing.assert_close(got, forward.hidden, rtol=1e-4, atol=1e-4)
    assert torch.equal(token, forward.token)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "programmatic-launch"])
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (16, 1), (1, 64)], ids=str)
def test_a_captured_forward_of_real_shapes_repeats_and_equals_eager(
    device: torch.device, size: tuple[int, int], pdl: bool
) -> None:
    if pdl and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("programmatic launch needs sm_90")
    dims = replace(QWEN3_30B_A3B, vocab=5000, experts=32)
    forward = build_forward(dims, 2, size, 500, device, torch.bfloat16)
    forward.run()
    eager = forward.hidden.clone()
    with programmatic_launch(pdl):
        forward.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward.run()
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(forward.hidden, eager)
