"""The bench's table: what a bar is compared with, and what peers' columns hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engine_rows import BANDWIDTH, OFF, floors_ms
from bench.engine_table import lines_of, main, table
from bench.kernel_table import kernel_lines, kernel_table


def _ours(wall: float, **changes: Any) -> dict[str, Any]:
    values = {
        "row": "decode",
        "name": "8 layers",
        "layers": 8,
        "batch": 4,
        "wall_ms": wall,
        "wall_low_ms": wall - 0.01,
        "wall_high_ms": wall + 0.01,
        "repeats": 3,
        "busy_ms": wall - 0.02,
        "floor_ms": 0.75,
        "distinct_experts": 29.0,
    }
    return values | changes


def test_our_runs_before_and_after_the_peers_are_one_line_with_their_range() -> None:
    rows = [
        _ours(0.98),
        {"row": "vllm", "name": "vLLM, 8 layers", "batch": 4, "wall_ms": 1.9},
        {"row": "vllm busy", "name": "vLLM, 8 layers", "batch": 4, "busy_ms": 1.2},
        {"row": "vllm", "name": "vLLM, 48 layers", "batch": 4, "wall_ms": 6.5},
        {"row": "peer", "layers": 8, "tokens": 4, "captured_ms": 2.8, "eager_ms": 17.0},
        {"row": "peer", "layers": 8, "tokens": 4, "captured_ms": 3.4, "eager_ms": 12.0},
        {"row": "peer", "layers": 8, "tokens": 4, "error": "out of memory"},
        _ours(1.02),
    ]
    (line,) = lines_of(rows)
    assert (line.wall, line.low, line.high, line.runs) == (1.0, 0.97, 1.03, 6)
    assert (line.vllm_wall, line.vllm_busy) == (1.9, 1.2)
    assert (line.transformers_captured, line.transformers_eager) == (2.8, 12.0)
    assert line.as_json()["vllm_over_ours"] == pytest.approx(1.9)
    text = table([line])
    assert "1.000 (0.970-1.030, 6)" in text
    assert "1.00 met" in text
    assert "1.90 (1.20), 1.90x" in text


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        pytest.param(_ours(1.001), "1.00 MISSED", id="just-above"),
        pytest.param(
            _ours(5.1, row="eagle3 k=3", layers=48, name="48 layers", batch=1),
            "5.20 met",
            id="eagle",
        ),
        pytest.param(
            _ours(1.6, name="8 layers, 2 GPUs, one-shot", batch=16), "1.70 met", id="two-gpus"
        ),
    ],
)
def test_a_bar_is_met_or_missed_and_absent_peers_are_empty(
    row: dict[str, Any], verdict: str
) -> None:
    text = table(lines_of([row]))
    assert verdict in text
    assert text.splitlines()[1].endswith("-")


def test_variants_of_ours_do_not_stand_for_the_default() -> None:
    assert lines_of([_ours(0.5, name="8 layers, PDL"), _ours(0.5, batch=5)]) == []


def test_peers_on_one_gpu_do_not_stand_beside_two() -> None:
    peer = {"row": "peer", "layers": 8, "tokens": 4, "captured_ms": 2.8, "eager_ms": 17.0}
    lines = lines_of([_ours(0.9), _ours(0.8, name="8 layers, 2 GPUs, NVLink"), peer])
    assert [(line.name, line.transformers_captured) for line in lines] == [
        ("8 layers", 2.8),
        ("8 layers, 2 GPUs, NVLink", None),
    ]


@pytest.mark.parametrize(("tp", "share"), [(1, 1.0), (2, 0.5)])
def test_a_floor_is_one_gpus_share_of_the_bytes(tp: int, share: float) -> None:
    whole, mine = floors_ms(8, 4, 29.0, OFF), floors_ms(8, 4, 29.0, OFF, tp)
    assert mine["head"] == pytest.approx(whole["head"] * share)
    assert mine["attention"] == pytest.approx(whole["attention"] * share)
    router_ms = 8 * 128 * 2048 * 2 / BANDWIDTH * 1e3
    assert mine["moe"] - router_ms == pytest.approx((whole["moe"] - router_ms) * share)


KERNELS = {"size": "1x4", "gpu": "H200", "us": 10.0, "range": [9.0, 11.0], "floor_us": 5.0}
VARIANT = {"lab": 2, "us": 8.0, "low_us": 7.5, "high_us": 8.5, "floor_us": 5.0}


def test_kernels_stand_with_the_most_lost_first_and_the_newest_figure_counts() -> None:
    rows = [
        KERNELS | {"kernel": "norm_linear"},
        KERNELS | {"kernel": "linear_add", "us": 9.0},
        KERNELS | {"kernel": "norm_linear", "size": "1x1", "us": 6.0},
        VARIANT | {"case": "whole 1x4 norm_linear", "name": "table"},
        VARIANT | {"case": "whole 1x4 linear_add", "name": "v4/512", "us": 1.0},
        VARIANT | {"case": "shard 1x4 linear_add", "name": "table", "us": 1.0},
        {"size": "1x4", "kernel": "forward of 8 layers", "us": 900.0, "floor_us": 800.0},
        {"size": "1x4", "kernel": "qkv_attention", "failure": "OutOfResources"},
        {"stage": "q8", "row": "start", "name": "8 layers"},
    ]
    lines = kernel_lines(rows)
    assert [(line.size, line.kernel, line.us) for line in lines] == [
        ("1x1", "norm_linear", 6.0),
        ("1x4", "linear_add", 9.0),
        ("1x4", "norm_linear", 8.0),
    ]
    assert [line.share for line in lines] == [5 / 6, 5 / 9, 5 / 8]
    assert "8.0 (7.5-8.5)" in kernel_table(lines)


def test_steps_and_kernels_of_several_files_are_printed_as_two_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.jsonl"
    path.write_text(json.dumps(KERNELS | {"kernel": "norm_linear"}) + "\n")
    results = Path(__file__).parents[2] / "studies/results/h200/engine-3.jsonl"
    assert main([str(results), str(path)]) == 0
    steps, kernels = capsys.readouterr().out.split("\n\n")
    assert "8 layers, 1 " in steps
    assert kernels.splitlines()[1].split()[:2] == ["1x4", "norm_linear"]
