"""Calibration: recovers constants, resists outliers, says what data cannot tell, round trips."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.model_accuracy.story import CHAIN, GRAPHS, predictor, workload
from model.calibrate import calibrate
from model.calibration import Calibration, default_calibration
from model.intervals import mixture_quantiles
from model.machine import load_machine
from model.observations import AllreduceObservation, ExpertsObservation, TermObservation
from model.predictor import Predictor
from model.routing import expected_experts
from model.spec import Knobs, Scalar

CPU: dict[str, Scalar | None] = {"parallel.tp": 2, "collectives.backend": "gloo"}
TRUE = {"dram_fraction": 0.45, "flops_fraction": 0.12, "launch_us": 25.0, "host_gap_us": 420.0,
        "draft_step_us": 300.0, "moe_expert_us": 55.0}  # fmt: skip


def cpu_predictor() -> Predictor:
    from model.acceptance import AcceptanceModel
    from model.shapes import DraftShape, ModelShape

    machine = load_machine("studies/machines/cpu-2core.yaml")
    target = ModelShape.load("studies/shapes/qwen3-30b-a3b")
    return Predictor(target, DraftShape.standard(target), machine, default_calibration(machine),
                     AcceptanceModel.prior())  # fmt: skip


def observed(p: Predictor, noise: float = 0.02, repeats: int = 3) -> list[TermObservation]:
    """Terms of some knobs as ``p`` with the true constants would show them."""
    truth = replace(p, calibration=p.calibration.with_values(**TRUE))
    rng = np.random.default_rng(0)
    trees = [(1, 1, 2), (3, 1, 4), (3, 4, 8), (5, 2, 16)]
    knobs = [Knobs.of(CPU)] + [
        Knobs.of({**CPU, "speculation.method": "eagle3", "speculation.steps": s,
                  "speculation.topk": k, "speculation.draft_tokens": n})
        for s, k, n in trees
    ]  # fmt: skip
    return [
        TermObservation(
            knobs=k, workload=workload(c), term=name, rel_sd=noise, source=f"r{repeat}",
            value_ms=v * float(np.exp(noise * rng.standard_normal())),
        )
        for k in knobs
        for c in (1, 4)
        for name, v in fast_terms(truth, k, c).items()
        for repeat in range(repeats)
    ]  # fmt: skip


def fast_terms(p: Predictor, knobs: Knobs, concurrency: int) -> dict[str, float]:
    """Terms with the host in its fast mode."""
    quick = replace(p, calibration=p.calibration.with_values(host_slow_share=0.001))
    return {n: v.median for n, v in quick.predict(knobs, workload(concurrency)).terms_ms.items()}


def test_constants_are_recovered_and_unseen_knobs_predicted() -> None:
    p = cpu_predictor()
    fitted = replace(p, calibration=calibrate(p.calibration, observed(p), p.step))
    for name in ("dram_fraction", "flops_fraction", "host_gap_us", "draft_step_us"):
        assert fitted.calibration[name] == pytest.approx(TRUE[name], rel=0.12), name
    unseen = Knobs.of({**CPU, "speculation.method": "eagle3", "speculation.steps": 6,
                       "speculation.topk": 8, "speculation.draft_tokens": 32})  # fmt: skip
    truth = replace(p, calibration=p.calibration.with_values(**TRUE))
    want = sum(fast_terms(truth, unseen, 8).values())
    got = fitted.predict(unseen, workload(8))
    assert sum(fast_terms(fitted, unseen, 8).values()) == pytest.approx(want, rel=0.05)
    prior = p.predict(unseen, workload(8))
    assert got.cycle_ms.high / got.cycle_ms.low < 0.4 * prior.cycle_ms.high / prior.cycle_ms.low


def test_outliers_hardly_move_the_fit() -> None:
    p, clean = cpu_predictor(), observed(cpu_predictor())
    wild = [replace(o, value_ms=o.value_ms * 3) if i % 29 == 0 else o for i, o in enumerate(clean)]
    a, b = (calibrate(p.calibration, rows, p.step) for rows in (clean, wild))
    for name in ("dram_fraction", "host_gap_us"):
        assert b[name] == pytest.approx(a[name], rel=0.06), name


def test_constants_without_data_keep_their_prior_and_are_reported() -> None:
    p = cpu_predictor()
    fitted = calibrate(p.calibration, observed(p), p.step)
    share = fitted.identifiability()
    assert share["host_gap_us"] > 0.9
    assert share["graph_launch_us"] == pytest.approx(0.0, abs=1e-9)
    assert fitted["graph_launch_us"] == pytest.approx(p.calibration["graph_launch_us"])
    low, high = fitted.interval("host_gap_us")
    assert low < TRUE["host_gap_us"] < high


def test_sums_and_allreduce_rows_are_observations_too() -> None:
    p = cpu_predictor()
    knobs = Knobs.of(CPU)
    truth = replace(p, calibration=p.calibration.with_values(**TRUE))
    cycle = sum(fast_terms(truth, knobs, 1).values())
    seen = [TermObservation(knobs=knobs, workload=workload(1), term="cycle", value_ms=cycle,
                            rel_sd=0.02)]  # fmt: skip
    fitted = replace(p, calibration=calibrate(p.calibration, seen, p.step))
    assert sum(fast_terms(fitted, knobs, 1).values()) == pytest.approx(cycle, rel=0.05)
    rows = [
        AllreduceObservation(backend="gloo", num_ranks=2, size_bytes=s, graphed=True,
                             time_us=500 + s / 2000, rel_sd=0.03)
        for s in (1024, 65536, 1048576)
    ]  # fmt: skip
    c = calibrate(p.calibration, rows, p.step)
    assert c.identifiability()["allreduce.gloo_gb_per_s"] > 0.5


@pytest.mark.parametrize(
    ("term", "message"),
    [("draft", "does not exist with speculation.method off"), ("decode.moo", "unknown term")],
)
def test_a_term_its_knobs_lack_is_refused(term: str, message: str) -> None:
    p = cpu_predictor()
    with pytest.raises(ValueError, match=message):
        calibrate(
            p.calibration,
            [TermObservation(knobs=Knobs.of(CPU), workload=workload(1), term=term, value_ms=1.0,
                             rel_sd=0.1)],
            p.step,
        )  # fmt: skip


def test_a_calibration_survives_json_and_names_its_parent() -> None:
    p = cpu_predictor()
    fitted = calibrate(p.calibration, observed(p), p.step)
    again = Calibration.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert again.id == fitted.id != p.calibration.id
    assert fitted.parent == p.calibration.id
    assert fitted.used == ("r0", "r1", "r2")
    with pytest.raises(ValueError, match="model_version 0"):
        Calibration.from_dict({**fitted.to_dict(), "model_version": 0})
    with pytest.raises(ValueError, match="unknown constant 'warp'"):
        fitted.with_values(warp=1.0)
    with pytest.raises(ValueError, match="not on scale"):
        fitted.with_values(launch_us=-1.0)


def test_every_constant_has_unit_prior_and_source() -> None:
    for name in ("cpu-2core", "8x-rtx-pro-6000-switches", "2x-h200-nvlink"):
        for c in default_calibration(load_machine(f"studies/machines/{name}.yaml")).constants:
            assert c.unit, c
            assert c.source, c
            assert c.prior_sd > 0, c


@pytest.mark.parametrize("share", [0.1, 0.45, 0.8])
@pytest.mark.parametrize("gap", [0.0, 0.15, 0.6])
def test_mixture_quantiles_equal_a_simulation(share: float, gap: float) -> None:
    rng = np.random.default_rng(1)
    slow = rng.random(400_000) < share
    draws = np.where(slow, gap + 0.05 * rng.standard_normal(slow.size),
                     0.08 * rng.standard_normal(slow.size))  # fmt: skip
    got = mixture_quantiles([0.0], [0.08], [gap], [0.05], share)[:, 0]
    if gap:
        want = np.exp(np.quantile(draws, [0.05, 0.5, 0.95]))
        np.testing.assert_allclose(got, want, rtol=0.01)
    else:
        assert got[1] == pytest.approx(1.0)


def test_counted_experts_tell_how_routing_is_skewed_and_only_that() -> None:
    """Counts of Qwen3.6-35B-A3B (256 experts, 8 a token): 8, 22, 36, 56 at 1, 4, 8, 16 tokens."""
    host = load_machine(Path(__file__).parents[2] / "studies/machines/8x-l40s.yaml")
    prior = default_calibration(host)
    counted = [
        ExpertsObservation(
            tokens_per_request=t, requests=1, experts=256, experts_per_token=8, distinct=n,
            rel_sd=0.03,
        )
        for t, n in ((1, 8.0), (4, 22.0), (8, 36.0), (16, 56.0))
    ]  # fmt: skip
    fitted = calibrate(prior, counted, None)
    law = expected_experts(
        [4.0, 8.0, 16.0], 1, 256, 8, fitted["routing_exponent"], fitted["routing_zipf"]
    )
    np.testing.assert_allclose(law, [22, 36, 56], rtol=0.08)
    changed = {c.name for c, p in zip(fitted.constants, prior.constants, strict=True)
               if c.value != pytest.approx(p.value)}  # fmt: skip
    assert changed <= {"routing_exponent", "routing_zipf", "host_slow_share", "discrepancy"}
    assert fitted.identifiability()["routing_exponent"] > 0.3
    with pytest.raises(ValueError, match="distinct 300"):
        ExpertsObservation(
            tokens_per_request=4, requests=1, experts=256, experts_per_token=8, distinct=300,
            rel_sd=0.03,
        )  # fmt: skip


def test_counted_experts_keep_a_fast_moe_from_being_read_as_fast_memory() -> None:
    """A head that drafts one token over and over: its verify reads 9 experts, not 26."""
    p = predictor("8x-rtx-pro-6000-switches")
    target = p.target
    chain = Knobs.of({**CHAIN, "speculation.steps": 3, **GRAPHS})
    plain = Knobs.of({"parallel.tp": 8, **GRAPHS})
    alike = replace(p, calibration=p.calibration.with_values(routing_exponent=0.06))
    seen = [
        TermObservation(
            knobs=knobs, workload=workload(1), term=name, value_ms=value.median, rel_sd=0.02
        )
        for knobs in (plain, chain)
        for name, value in alike.predict(knobs, workload(1)).terms_ms.items()
    ]
    counted = ExpertsObservation(
        tokens_per_request=4, requests=1, experts=target.experts,
        experts_per_token=target.experts_per_token, distinct=9.0, rel_sd=0.03,
    )  # fmt: skip
    without = calibrate(p.calibration, seen, p.step)
    fitted = calibrate(p.calibration, [*seen, counted], p.step)
    expected = expected_experts(
        4.0, 1, target.experts, target.experts_per_token,
        fitted["routing_exponent"], fitted["routing_zipf"],
    )  # fmt: skip
    assert float(expected) == pytest.approx(9.0, rel=0.15)
    truth = p.calibration["moe_dram_fraction"]
    assert abs(np.log(fitted["moe_dram_fraction"] / truth)) < 0.1
    assert abs(np.log(fitted["moe_dram_fraction"] / truth)) <= 0.01 + abs(
        np.log(without["moe_dram_fraction"] / truth)
    )
