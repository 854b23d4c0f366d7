"""What the benchmark and tuning trust: the error they compute, and inputs that differ."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import timing
from kernels.basic_cases import basic_cases
from kernels.catalog import ODD, QWEN3_30B_A3B, Case, layer_cases, shard
from kernels.opset import OpSet, opset
from kernels.timing import relative_error, rotated_inputs

SMALL = replace(ODD, hidden=40, heads=4, head_size=16, experts=6, inter=24, vocab=60)
CASES = layer_cases(SMALL, 2, 2, 5) + basic_cases(SMALL, 2, 2, 5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_of_the_catalog_is_right(device: torch.device, case: Case) -> None:
    assert relative_error(case, case.make(device, torch.bfloat16)) < 0.03


def test_a_wrong_kernel_is_noticed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(change: Callable[[Any], Any]) -> Callable[[str], OpSet]:
        def choose(name: str) -> OpSet:
            ops = opset(name)
            if name == "reference":
                return ops
            return replace(
                ops,
                linear_add=lambda *a: change(ops.linear_add(*a)),
                norm_route=lambda *a: (ops.norm_route(*a)[0], ops.norm_route(*a)[1].flip(1)),
                norm_linear_argmax=lambda *a: (
                    (ops.norm_linear_argmax(*a)[0] + 1) % SMALL.vocab,
                    ops.norm_linear_argmax(*a)[1],
                ),
            )

        return choose

    by_name = {case.name: case for case in CASES}
    for change in (lambda y: y * 1.1, lambda y: torch.full_like(y, float("nan"))):
        monkeypatch.setattr(timing, "opset", spoiled(change))
        for name in ("linear_add", "norm_route", "norm_linear_argmax"):
            case = by_name[name]
            assert relative_error(case, case.make(device, torch.float32)) > 0.03


def test_rotated_inputs_do_not_share_what_is_rotated(device: torch.device) -> None:
    case = next(case for case in CASES if case.name == "norm_linear")
    inputs = rotated_inputs(case, device, torch.float32)
    assert len({i["w"].data_ptr() for i in inputs}) == len(inputs) > 1
    assert len({i["x"].data_ptr() for i in inputs}) == 1
    assert all(torch.equal(i["w"], inputs[0]["w"]) for i in inputs)


def test_rotated_experts_touch_more_than_any_cache_holds(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name == "norm_moe_add")
    first = case.make(device, torch.float32)
    monkeypatch.setattr(timing, "ROTATION_BYTES", 20 * case.min_bytes(first))
    inputs = rotated_inputs(case, device, torch.float32)
    touched = [
        (i["gate_up"].data_ptr(), expert)
        for i in inputs
        for expert in i["expert"].unique().tolist()
    ]
    each = case.min_bytes(first) / first["expert"].unique().numel()
    assert len(touched) * each >= 0.7 * timing.ROTATION_BYTES
    assert len({i["expert"].data_ptr() for i in inputs}) == len(inputs)


def test_shards_divide_and_say_when_they_cannot() -> None:
    half = shard(QWEN3_30B_A3B, 2)
    assert (half.heads, half.kv_heads, half.inter, half.hidden) == (16, 2, 384, 2048)
    assert shard(QWEN3_30B_A3B, 8).kv_heads == 1
    with pytest.raises(ValueError, match="qwen3-30b-a3b cannot be split 3 ways: 32 heads, 768"):
        shard(QWEN3_30B_A3B, 3)
