"""Experts touched, MoE layer times on published rows, and refused input."""

from pathlib import Path

import numpy as np
import pytest

from bench.model_accuracy import moe as bench
from model.moe import MoeRow, MoeWork, layer_us, read_moe_rows, resident_share
from model.routing import (
    balanced_loads,
    correlated_experts,
    distinct_from_counts,
    expected_experts,
    power_law_loads,
    skewed_experts,
    uniform_experts,
    zipf_probabilities,
)


def test_one_token_touches_its_experts_and_many_touch_all() -> None:
    for law in (
        uniform_experts([1, 1e6], 64, 8),
        correlated_experts([1, 1e6], 1, 64, 8, 0.75),
        expected_experts([1.0, 1e9], 1.0, 64, 8, 0.8, 0.7),
    ):
        np.testing.assert_allclose(law, [8, 64], rtol=1e-3)


def test_uniform_law_equals_a_simulation() -> None:
    rng = np.random.default_rng(0)
    hits = [
        len(set(np.concatenate([rng.choice(32, 4, replace=False) for _ in range(6)])))
        for _ in range(4000)
    ]
    assert float(uniform_experts(6, 32, 4)) == pytest.approx(np.mean(hits), rel=0.01)


def test_published_counts_of_a_chain_are_met_by_correlated_routing() -> None:
    got = correlated_experts([4, 8, 16], 1, 256, 8, 0.75)
    np.testing.assert_allclose(got, [22, 36, 56], rtol=0.03)


def test_skew_and_correlation_only_lower_the_count() -> None:
    tokens = np.array([2.0, 8, 32, 128])
    uniform = uniform_experts(tokens, 128, 8)
    assert (correlated_experts(tokens, 1, 128, 8, 0.7) < uniform).all()
    assert (skewed_experts(tokens, zipf_probabilities(128, 0.8), 8) < uniform).all()
    assert (expected_experts(1.0, tokens, 128, 8, 1.0, 0.8) < uniform).all()
    np.testing.assert_allclose(expected_experts(1.0, tokens, 128, 8, 1.0, 0.0), uniform)
    np.testing.assert_allclose(
        skewed_experts(tokens, zipf_probabilities(128, 0.0), 8), uniform, rtol=1e-6
    )


@pytest.mark.parametrize("tokens", [1, 4, 8, 48, 320, 1024])
@pytest.mark.parametrize("alpha", [1.01, 1.2])
def test_benchmark_loads_keep_every_assignment(tokens: int, alpha: float) -> None:
    for loads in (balanced_loads(tokens, 384, 8), power_law_loads(tokens, 384, 8, alpha)):
        assert loads.sum() == tokens * 8
        assert loads.min() >= 0
        assert loads.max() <= max(tokens, 1)


def test_measured_counts_interpolate_between_token_counts() -> None:
    got = distinct_from_counts([8, 22, 36], [1, 4, 8], [1, 2, 8, 100])
    assert got[0] == pytest.approx(8)
    assert 8 < got[1] < 22
    assert got[3] == pytest.approx(36)
    with pytest.raises(ValueError, match="must rise"):
        distinct_from_counts([8, 22], [4, 1], 2)


def test_cold_layers_are_predicted_leave_one_token_count_out() -> None:
    scores = bench.evaluate()
    assert len(scores) == 7
    assert bench.pooled_cold_mape(scores) < 0.025
    for s in scores:
        assert s.cold_mape < 0.08, s
        assert s.cold_coverage > 0.75, s
    hot = sum(s.hot_coverage * s.num_hot for s in scores) / sum(s.num_hot for s in scores)
    assert hot > 0.8


def row(tokens: int, **change: object) -> MoeRow:
    values: dict[str, object] = {
        "gpu": "g", "kernel": "k", "weight_format": "int4_g32", "hidden": 7168,
        "intermediate": 2048, "experts": 384, "per_token": 8, "tp": 8, "routing": "balanced",
        "tokens": tokens, "time_us": 50.0,
    }  # fmt: skip
    return MoeRow(**{**values, **change})  # type: ignore[arg-type]


def test_a_step_reads_cold_what_a_benchmark_finds_in_the_cache() -> None:
    work = MoeWork.of([row(2), row(64)], l2_bytes=128 * 2**20)
    assert list(work.cold) == [False, True]
    c = {
        name: np.array([[value]])
        for name, value in (
            ("fixed_us", 20.0), ("floor_us", 1.0), ("dram_gb_per_s", 1500.0),
            ("gflop_us", 0.0), ("fullest_gflop_us", 0.0), ("l2_over_dram", 3.0),
        )
    }  # fmt: skip
    bench_us, step_us = layer_us(work, c, in_step=False), layer_us(work, c, in_step=True)
    assert bench_us[0, 0] < step_us[0, 0]
    assert bench_us[0, 1] == step_us[0, 1]
    assert resident_share(np.array([0.5, 1.3, 2.0])).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("g,k,int7,8,8,8,2,1,balanced,1,5", "weight_dtype 'int7'", id="dtype"),
        pytest.param(
            "g,k,int4_wo,8,8,8,2,1,balanced,0,5", "tokens '0' must be a whole", id="tokens"
        ),
        pytest.param(
            "g,k,int4_wo,8,8,8,2,1,balanced,1,-5", "time_us '-5' must be a time > 0 us", id="time"
        ),
        pytest.param("g,k,int4_wo,x,8,8,2,1,balanced,1,5", "line 2", id="no-number"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "moe.csv"
    head = "gpu,kernel,weight_dtype,hidden,intermediate,experts,top_k,tp,routing,tokens,time_us\n"
    file.write_text(head + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_moe_rows(file)


def test_an_unknown_routing_law_is_refused() -> None:
    with pytest.raises(ValueError, match="routing 'zigzag' is unknown"):
        _ = row(4, routing="zigzag").loads
