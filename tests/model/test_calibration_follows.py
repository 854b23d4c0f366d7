"""Calibration follows what is measured: simulated hosts within the priors and far outside.

A host is a draw of all constants, plus what the formulas leave out: a factor for each knobs, as
large as the model itself states, and one for each of its terms. A few knobs are measured, others
predicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from model.acceptance import AcceptanceModel
from model.calibrate import calibrate
from model.calibration import default_calibration
from model.constants import as_mapping, from_scale
from model.machine import load_machine
from model.observations import TermObservation
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import Knobs, Scalar, Workload
from model.step_columns import StepRows

ROOT = Path(__file__).parents[2]
LOAD = Workload(
    prompts="p", prompts_sha256="", chat_template=None, input_len=900, output_len=200, context=1000,
    temperature=0.0, ignore_eos=True, seed=0, concurrency=1,
)  # fmt: skip
GRAPHS: dict[str, Scalar | None] = {
    f"cuda_graph.{n}": True for n in ("decode", "draft", "verify", "extend")
}
HOSTS = 10
MEASURED = 4
UNSEEN = 7
#: not physical rates of this host but shares and spreads, fitted in their own way
KEPT = ("discrepancy", "host_slow_share", "host_slow_ratio", "host_jitter")


@cache
def predictor(kind: str) -> Predictor:
    if kind == "cpu":
        machine, target = "cpu-2core", ModelShape.load(ROOT / "studies/models/tiny-moe")
        draft = DraftShape.load(ROOT / "studies/models/tiny-moe-eagle3", target=target)
    else:
        machine = "8x-rtx-pro-6000-switches"
        target = ModelShape.load(ROOT / "studies/shapes/qwen3-235b-a22b")
        draft = DraftShape.standard(target)
    host = load_machine(ROOT / f"studies/machines/{machine}.yaml")
    return Predictor(target, draft, host, default_calibration(host), AcceptanceModel.prior(0.75))


@cache
def space(kind: str) -> tuple[Knobs, ...]:
    """The baseline, then speculation of several trees, graphed or not, two protocols on GPUs."""
    variants: list[dict[str, Scalar | None]] = [{}]
    base: dict[str, Scalar | None] = {"parallel.tp": 2, "collectives.backend": "gloo"}
    if kind != "cpu":
        base = {"parallel.tp": 8}
        variants = [{**GRAPHS, **n} for n in ({}, {"nccl.proto": "Simple"})] + [{}]
    found = []
    for variant in variants:
        found.append(Knobs.of({**base, **variant}))
        for steps, topk, tokens in ((1, 1, 2), (2, 1, 3), (3, 1, 4), (5, 1, 6), (2, 2, 5),
                                    (3, 2, 8), (3, 4, 8), (5, 4, 16)):  # fmt: skip
            tree: dict[str, Scalar | None] = {
                "speculation.method": "eagle3",
                "speculation.steps": steps,
                "speculation.topk": topk,
                "speculation.draft_tokens": tokens,
            }
            found.append(Knobs.of({**base, **variant, **tree}))
    return tuple(found)


@dataclass
class Host:
    """A simulated truth."""

    kind: str
    rng: np.random.Generator
    off: Mapping[str, float]

    def __post_init__(self) -> None:
        p = predictor(self.kind)
        values = {
            c.name: float(from_scale(x + c.prior_sd * self.rng.standard_normal(), c.scale))
            for c, x in zip(p.calibration.constants, p.calibration.x, strict=True)
            if c.name not in KEPT
        }
        values |= {name: p.calibration[name] * factor for name, factor in self.off.items()}
        self.truth = p.calibration.with_values(**values)

    def measure(self, knobs: Knobs) -> dict[str, float]:
        """Terms of a cycle, ms."""
        rows = StepRows.of([knobs], [LOAD])
        c = as_mapping(self.truth.constants, self.truth.x[None])
        terms = predictor(self.kind).step.terms_ms(rows, c, False)
        spec = knobs.method != "off"
        whole = self.rng.normal(0.0, self.truth["discrepancy"])
        return {
            name.replace("target.", "verify." if spec else "decode."): float(np.ravel(v)[0])
            * float(np.exp(whole + self.rng.normal(0.0, 0.03)))
            for name, v in terms.items()
            if spec or name not in ("draft", "extend")
        }

    def observe(self, knobs: Knobs) -> list[TermObservation]:
        return [
            TermObservation(knobs=knobs, workload=LOAD, term=n, value_ms=v, rel_sd=0.02)
            for n, v in self.measure(knobs).items()
            if v > 0
        ]


def scores(
    kind: str, off: Mapping[str, float] | None, counts: tuple[int, ...]
) -> dict[int, tuple[float, float]]:
    """By number of measured knobs: (median |log error| of unseen cycles, coverage of 90 %)."""
    p = predictor(kind)
    errors: dict[int, list[float]] = {k: [] for k in counts}
    inside: dict[int, list[bool]] = {k: [] for k in counts}
    names = [c.name for c in p.calibration.constants if c.unit.startswith("us")]
    for seed in range(HOSTS):
        rng = np.random.default_rng(seed)
        far = off
        if far is None:
            chosen = rng.choice(names, 2, replace=False)
            far = {str(n): float(3 ** (rng.choice([-1, 1]) * rng.uniform(1, 3))) for n in chosen}
        host = Host(kind, rng, far)
        order = [0, *(1 + rng.permutation(len(space(kind)) - 1))]
        unseen = [space(kind)[i] for i in order[MEASURED : MEASURED + UNSEEN]]
        cycles = [sum(host.measure(k).values()) for k in unseen]
        seen = [host.observe(space(kind)[i]) for i in order[:MEASURED]]
        for count in counts:
            told = [o for group in seen[:count] for o in group]
            fitted = replace(p, calibration=calibrate(p.calibration, told, p.step))
            for knobs, cycle in zip(unseen, cycles, strict=True):
                predicted = fitted.predict(knobs, LOAD).cycle_ms
                errors[count].append(abs(float(np.log(predicted.median / cycle))))
                inside[count].append(predicted.low <= cycle <= predicted.high)
    return {k: (float(np.median(errors[k])), float(np.mean(inside[k]))) for k in counts}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "off",
    [pytest.param({}, id="within-the-priors"), pytest.param(None, id="two-3-to-27-times-off")],
)
def test_measured_knobs_improve_unseen_ones_and_intervals_stay_honest(
    kind: str, off: Mapping[str, float] | None
) -> None:
    found = scores(kind, off, (0, 2, MEASURED))
    error = {count: value[0] for count, value in found.items()}
    assert error[MEASURED] < 0.8 * error[0]
    assert error[MEASURED] < 1.3 * error[2]
    # what one knobs differs from the formulas is all that may remain; the median over 70 cycles of
    # 10 hosts is itself known within 15 % (0.071 over 30 hosts, 0.076 over these)
    assert error[MEASURED] < 1.6 * predictor(kind).calibration["discrepancy"]
    assert 0.80 <= found[MEASURED][1] <= 0.98


@pytest.mark.parametrize("factor", [3.0, 16.0, 60.0])
def test_a_loaded_host_is_followed_after_one_measurement(factor: float) -> None:
    """All-reduces of 64 ms a token against 4 ms: the ranks of a busy host wait for each other."""
    p = predictor("cpu")
    baseline = space("cpu")[0]
    rows = p.predict(baseline, LOAD).terms_ms
    seen = [
        TermObservation(
            knobs=baseline, workload=LOAD, term=name, rel_sd=0.05,
            value_ms=value.median * (factor if name == "decode.allreduce" else 1.0),
        )
        for name, value in rows.items()
    ]  # fmt: skip
    fitted = replace(p, calibration=calibrate(p.calibration, seen, p.step))
    after = fitted.predict(baseline, LOAD).terms_ms["decode.allreduce"].median
    assert after == pytest.approx(factor * rows["decode.allreduce"].median, rel=0.2)
    for name in ("decode.moe", "decode.attention"):
        assert fitted.predict(baseline, LOAD).terms_ms[name].median == pytest.approx(
            rows[name].median, rel=0.15
        )
    before = p.calibration
    gloo = [n for n in before.names if n.startswith("allreduce.gloo_") and "gb_per_s" not in n]
    assert all(fitted.calibration[n] >= 0.99 * before[n] for n in gloo)


def test_one_wild_repeat_among_many_is_let_go() -> None:
    p = predictor("cpu")
    knobs = space("cpu")[:6]
    seen = []
    for n, one in enumerate(knobs):
        for name, value in p.predict(one, LOAD).terms_ms.items():
            wild = 8.0 if n == 3 and name == "verify.moe" else 1.0
            seen.append(TermObservation(
                knobs=one, workload=LOAD, term=name, rel_sd=0.02, value_ms=value.median * wild,
            ))  # fmt: skip
    fitted = replace(p, calibration=calibrate(p.calibration, seen, p.step))
    for one in knobs:
        term = "decode.moe" if one.method == "off" else "verify.moe"
        before, after = (q.predict(one, LOAD).terms_ms[term].median for q in (p, fitted))
        assert after == pytest.approx(before, rel=0.12)


def far_beyond(kind: str, term: str, added_ms: float, count: int) -> Predictor:
    """Calibrated on some knobs of which one verify term takes longer than any formula says."""
    p = predictor(kind)
    seen = []
    for knobs in space(kind)[:count]:
        for name, value in p.predict(knobs, LOAD).terms_ms.items():
            more = added_ms * knobs.draft_tokens if name == term else 0.0
            seen.append(TermObservation(
                knobs=knobs, workload=LOAD, term=name, rel_sd=0.02, value_ms=value.median + more,
            ))  # fmt: skip
    return replace(p, calibration=calibrate(p.calibration, seen, p.step))


@pytest.mark.parametrize("term", ["verify.other", "verify.attention", "verify.head", "draft"])
def test_what_the_model_lacks_never_makes_a_constant_absurd(term: str) -> None:
    fitted = far_beyond("gpu", term, 20.0, 9).calibration
    for constant in fitted.constants:
        assert constant.least <= constant.value <= constant.most, constant.name
    assert fitted["graph_launch_us"] <= 250


def test_a_term_whose_formula_lacks_something_says_so_by_itself() -> None:
    fitted = far_beyond("gpu", "verify.head", 20.0, 9)
    residuals = fitted.calibration.term_residuals
    assert residuals["target.head"] > 3 * residuals["host_gap"]
    head = fitted.predict(space("gpu")[5], LOAD).terms_ms["verify.head"]
    assert np.log(head.high / head.low) > 2 * 1.6 * residuals["target.head"]


def test_one_or_two_measured_knobs_do_not_make_the_model_better_than_it_is() -> None:
    p = predictor("gpu")
    prior = p.calibration["discrepancy"]
    host = Host("gpu", np.random.default_rng(3), {})
    seen = [host.observe(knobs) for knobs in space("gpu")[:6]]
    for count in (1, 2, 6):
        told = [o for group in seen[:count] for o in group]
        found = calibrate(p.calibration, told, p.step)["discrepancy"]
        assert count > 2 or found >= prior
