"""Kernel times: limits of each formula, heads over ranks, contexts, memory."""

from dataclasses import replace

import numpy as np
import pytest

from model import compute
from model.calibration import default_calibration
from model.compute import Device, Forwards
from model.constants import as_mapping
from model.machine import load_machine
from model.memory import memory_use
from model.shapes import ModelShape

MACHINE = load_machine("studies/machines/8x-rtx-pro-6000-switches.yaml")
GQA = ModelShape.load("studies/shapes/qwen3-235b-a22b")
MLA = ModelShape.load("studies/shapes/deepseek-v3")


def constants() -> dict[str, np.ndarray]:
    c = default_calibration(MACHINE)
    return dict(as_mapping(c.constants, c.x[None]))


def forwards(tokens: float, context: float = 1000.0, tp: float = 8.0, requests: float = 1.0):  # type: ignore[no-untyped-def]
    return Forwards(
        tokens_per_request=np.array([tokens]),
        requests=np.array([requests]),
        context=np.array([context]),
        tp=np.array([tp]),
    )


def test_a_small_gemm_is_bound_by_bytes_and_a_large_one_by_flops() -> None:
    device, c = Device.of(MACHINE, 8), constants()
    weights = 4096.0 * 4096
    one = compute.gemm_us(np.array(2 * weights), np.array(2 * weights), 1.0, device, c, np.array(1))
    assert one[0, 0] == pytest.approx(2 * weights / 1792e3 / float(c["dram_fraction"][0, 0]))
    rows = 4096.0
    many = compute.gemm_us(
        np.array(2 * weights), np.array(2 * weights * rows), 1.0, device, c, np.array(rows)
    )
    peak = 467.8e6 * float(c["flops_fraction"][0, 0])
    assert many[0, 0] == pytest.approx(2 * weights * rows / peak)


def test_attention_grows_with_context_by_the_cache_bytes() -> None:
    device, c = Device.of(MACHINE, 8), constants()
    for shape, heads_share in ((GQA, 1 / 4), (MLA, 1.0)):
        short, long = (
            compute.attention_us(shape, forwards(1, context=x), device, c)[0, 0]
            for x in (1000, 9000)
        )
        bytes_ = 8000 * shape.kv_elements_per_token_layer * 2 * shape.layers * heads_share
        want = bytes_ / (1792e3 * float(c["kv_fraction"][0, 0]))
        assert long - short == pytest.approx(want, rel=0.01)


def test_a_sliding_window_stops_the_growth() -> None:
    device, c = Device.of(MACHINE, 8), constants()
    windowed = replace(GQA, sliding_layers=GQA.layers, sliding_window=128)
    a, b = (
        compute.attention_us(windowed, forwards(1, context=x), device, c)[0, 0]
        for x in (1000, 9000)
    )
    assert a == b


def test_linear_attention_layers_keep_no_cache() -> None:
    device, c = Device.of(MACHINE, 8), constants()
    linear = replace(GQA, linear_attention_layers=GQA.layers)
    a, b = (
        compute.attention_us(linear, forwards(1, context=x), device, c)[0, 0] for x in (1000, 9000)
    )
    assert a == b


def test_experts_of_more_tokens_cost_less_than_their_number() -> None:
    device, c = Device.of(MACHINE, 8), constants()
    one, four = (compute.moe_us(MLA, forwards(t), device, c)[0, 0] for t in (1, 4))
    assert one < four < 4 * one


def test_fewer_kv_heads_than_ranks_are_repeated_in_memory() -> None:
    def cache(shape: ModelShape, tp: float) -> float:
        use = memory_use(
            shape, None, tp=np.array([tp]), speculative=np.array([False]),
            draft_tokens=np.array([0.0]), num_graphs=np.array([0.0]), requests=1,
            max_context=1000, device=Device.of(MACHINE, 8),
        )  # fmt: skip
        return float(use.kv_cache[0])

    assert GQA.kv_heads == 4
    assert cache(GQA, 4) == pytest.approx(cache(GQA, 1) / 4)
    assert cache(GQA, 8) == pytest.approx(cache(GQA, 4))
    assert cache(MLA, 8) == pytest.approx(cache(MLA, 1))
