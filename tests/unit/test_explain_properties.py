"""What holds of every explanation, whatever the host, the model and the knobs: seeded draws."""

import dataclasses
import random
from functools import cache
from pathlib import Path

import pytest

from autotune.explain.explanation import Explanation, explain
from autotune.explain.gain import gains
from autotune.explain.importance import importances
from autotune.explain.plans import BOUND_CHOICES
from autotune.explain.subject import Repeat, Subject
from model.acceptance import AcceptanceModel
from model.calibration import default_calibration
from model.machine import load_machine
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import CYCLE_TERMS, DECODE_TERMS, Interval, Knobs, Scalar, Workload

ROOT = Path(__file__).parents[2]
HOSTS = ("8x-rtx-pro-6000-switches", "8x-rtx-pro-6000-direct", "8x-l40s", "2x-h200-nvlink")
SHAPES = ("kimi-k2.5", "qwen3-30b-a3b", "deepseek-v3")
SEEDS = range(6)


@cache
def predictor(machine: str, shape: str) -> Predictor:
    host = load_machine(ROOT / f"studies/machines/{machine}.yaml")
    target = ModelShape.load(ROOT / f"studies/shapes/{shape}")
    return Predictor(
        target, DraftShape.standard(target), host, default_calibration(host),
        AcceptanceModel.prior(),
    )  # fmt: skip


def subject(seed: int) -> Subject:
    """Some knobs of some host, half of them measured."""
    rng = random.Random(seed)
    model = predictor(HOSTS[seed % len(HOSTS)], rng.choice(SHAPES))
    ranks = model.machine.num_gpus
    values: dict[str, Scalar | None] = {
        "parallel.tp": ranks,
        "nccl.proto": rng.choice(["auto", "LL", "Simple"]),
        "nccl.min_channels": rng.choice([None, 8]),
        "speculation.method": rng.choice(["off", "eagle3", "eagle3"]),
    }
    if values["speculation.method"] == "eagle3":
        steps = rng.randint(1, 5)
        values |= {"speculation.steps": steps, "speculation.topk": 1}
    captured = rng.random() < 0.6
    values |= {f"cuda_graph.{n}": captured for n in ("decode", "draft", "verify", "extend")}
    knobs = Knobs.of(values)
    load = Workload(
        prompts="p", prompts_sha256="", chat_template=None, input_len=900, output_len=200,
        context=1000, temperature=0.0, ignore_eos=True, seed=0, concurrency=rng.choice([1, 8]),
    )  # fmt: skip
    repeats = tuple(_repeat(model, knobs, load, rng) for _ in range(4 * (seed % 2)))
    return Subject(
        title="drawn", knobs=knobs, workload=load, predictor=model, prior=model.acceptance,
        repeats=repeats,
    )  # fmt: skip


def _repeat(model: Predictor, knobs: Knobs, load: Workload, rng: random.Random) -> Repeat:
    names = CYCLE_TERMS if knobs.method != "off" else DECODE_TERMS
    predicted = model.predict(knobs, load)
    terms = {n: predicted.terms_ms[n].median * rng.uniform(0.5, 2.0) for n in names}
    cycle = sum(terms.values()) * rng.uniform(1.0, 1.2)
    accepted = predicted.accept_length.median
    return Repeat(
        concurrency=load.concurrency, tokens_per_s=1e3 * load.concurrency * accepted / cycle,
        tpot_ms=None, ttft_ms=None, cycle_ms=cycle, accept_length=accepted, terms_ms=terms,
        acceptance=None, output_check="exact",
    )  # fmt: skip


@cache
def explained(seed: int) -> Explanation:
    return explain(subject(seed))


def intervals(value: object) -> list[Interval]:
    """Every interval anywhere in a value."""
    if isinstance(value, Interval):
        return [value]
    if isinstance(value, list | tuple):
        return [found for part in value for found in intervals(part)]
    if isinstance(value, dict):
        return [found for part in value.values() for found in intervals(part)]
    if dataclasses.is_dataclass(value) and not isinstance(value, Subject | Predictor | type):
        parts = [getattr(value, f.name) for f in dataclasses.fields(value)]
        return [found for part in parts for found in intervals(part)]
    return []


@pytest.mark.parametrize("seed", SEEDS)
def test_every_interval_is_ordered(seed: int) -> None:
    found = intervals(explained(seed))
    assert len(found) > 20
    for one in found:
        assert one.low <= one.median * (1 + 1e-9) + 1e-9
        assert one.median <= one.high * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_no_time_is_negative_and_shares_add_up_to_one(seed: int) -> None:
    found = explained(seed)
    for row in found.rows:
        for one in intervals((row.predicted,)):
            assert one.low >= 0
    shares = [row.share for row in found.rows if row.share is not None]
    assert sum(shares) == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in shares)
    assert all(row.of_light is None or row.of_light >= 0 for row in found.rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_nccl_can_save_is_between_nothing_and_the_cycle(seed: int) -> None:
    bound = explained(seed).nccl
    assert bound is not None
    for one in (bound.saved_ms, bound.swing_ms, bound.saved_share, bound.now_ms):
        assert one.low >= 0
    assert bound.saved_share.high <= 1
    assert 1 <= bound.num_inert <= bound.num_settings
    if bound.measured_ms is not None:
        # draft and extend have all-reduces of their own
        assert bound.saved_ms.median <= bound.measured_ms + bound.now_ms.high


@pytest.mark.parametrize("seed", [s for s in SEEDS if s % 2 == 0])
def test_no_single_nccl_setting_gains_more_than_the_bound(seed: int) -> None:
    found, case = explained(seed), subject(seed)
    assert found.nccl is not None
    others = []
    for name, values in BOUND_CHOICES.items():
        for value in values:
            try:
                others.append(Knobs.of({**case.knobs.values(), name: value}))
            except ValueError:
                continue
    others = [k for k in others if case.predictor.predict(k, case.workload).feasible]
    for gain in gains(case.predictor, case.knobs, others, case.workload):
        change = gain.cycle_change_ms
        assert -change.median <= found.nccl.saved_ms.median + 1e-6, gain.knobs.label()
        assert -change.low <= found.nccl.saved_ms.high + 1e-6, gain.knobs.label()


@pytest.mark.parametrize("seed", SEEDS)
def test_chances_are_chances_and_break_even_agrees_with_the_lever(seed: int) -> None:
    found = explained(seed)
    levers = (*found.helping, *found.not_helping)
    assert all(0 <= lever.gain.probability <= 1 for lever in levers)
    medians = [lever.gain.ratio.median for lever in found.helping]
    assert medians == sorted(medians, reverse=True)
    pays = found.breakeven
    if pays is None:
        return
    assert 0 <= pays.probability <= 1
    assert pays.pays == (pays.accept_length > pays.accept_length_needed)
    off = next((lever for lever in levers if lever.name == "speculation off"), None)
    if off is not None and pays.cycle_source == pays.plain_source == "predicted":
        assert pays.margin.median == pytest.approx(1 / off.gain.ratio.median, rel=0.02)
        assert pays.probability == pytest.approx(1 - off.gain.probability, abs=0.02)


def test_what_only_speculation_has_is_not_blamed_for_speculation() -> None:
    """Every speculative knobs captured its draft; the baseline has none to capture."""
    captured = {f"cuda_graph.{n}": True for n in ("decode", "draft", "verify", "extend")}
    plain = Knobs.of({**captured, "speculation.method": "off"})
    trees = [
        Knobs.of({**captured, "speculation.method": "eagle3", "speculation.steps": steps,
                  "speculation.topk": 1})
        for steps in (1, 2, 3, 4, 5, 6)
    ]  # fmt: skip
    measured = [(plain, 50.0), *((knobs, 100.0 + knobs.steps) for knobs in trees)]
    space: dict[str, tuple[Scalar, ...]] = {
        "speculation.method": ("off", "eagle3"),
        "cuda_graph.draft": (False, True),
        "cuda_graph.verify": (False, True),
    }
    found = {item.knob: item for item in importances(measured, {}, 0.01, space)}
    for name in ("cuda_graph.draft", "cuda_graph.verify"):
        assert found[name].effect is None
        assert found[name].reason == "measured with one value only"
    assert found["speculation.method"].effect is not None
