"""Cycles recorded on one H200, predicted before anything was measured and after a few rows.

Each bound fails for the model before it knew servers: slices off by 46 % with 7 % of intervals
holding, the tiny model's grid by 88 % with 10 %.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

from autotune.backends.recording import read_recording
from bench.model_accuracy.recorded import (
    RESULTS,
    Row,
    Score,
    after,
    engine_rows,
    from_priors,
    predictor,
    vllm_rows,
)
from model.observations import AcceptanceCounts, TermObservation
from model.predictor import Predictor
from model.spec import Knobs, Workload

GRID = read_recording(RESULTS / "h200-grid.jsonl.gz").repeats


def rows_of(kind: str) -> list[Row]:
    rows = vllm_rows() if kind == "vllm" else engine_rows()
    return [row for row in rows if row.kind == kind]


@pytest.mark.parametrize(
    ("kind", "count", "most"),
    [("slice", 27, 0.08), ("tiny", 15, 0.12), ("vllm", 16, 0.2)],
)
def test_priors_are_near_recorded_cycles_and_their_intervals_hold_them(
    kind: str, count: int, most: float
) -> None:
    rows = rows_of(kind)
    score = Score.of(kind, rows, from_priors(rows))
    assert score.rows == count
    assert score.median < most
    assert score.coverage >= 0.85


@pytest.mark.parametrize("kind", ["slice", "tiny"])
def test_intervals_before_measuring_are_no_wider_than_they_have_to_be(kind: str) -> None:
    widths = [p.high / p.low for p in from_priors(rows_of(kind))]
    assert np.median(widths) < 3.0


def test_an_eager_verify_of_a_slice_lies_within_its_interval() -> None:
    (row,) = rows_of("slice, eager verify")
    (predicted,) = from_priors([row])
    assert predicted.low <= row.cycle_ms <= predicted.high
    assert predicted.high < 8 * predicted.low


def test_eight_layers_tell_what_48_take() -> None:
    rows = rows_of("slice")
    deep = [row for row in rows if row.layers == 48]
    score = Score.of("", deep, after(deep, [row for row in rows if row.layers == 8]))
    assert score.median < 0.06
    assert score.coverage >= 0.8


@dataclasses.dataclass(frozen=True)
class Grid:
    """The tiny model's grid: medians by knobs and level, and what a trial tells."""

    speeds: dict[tuple[Knobs, Workload], float]
    told: dict[Knobs, list[TermObservation | AcceptanceCounts]]

    def judged(self, p: Predictor, chosen: Sequence[Knobs]) -> tuple[float, float]:
        """(median error, share of 90 % intervals that hold) of tokens/s."""
        errors, inside = [], []
        for load in {load for _, load in self.speeds}:
            low, middle, high = p.predict_many(chosen, load).tokens_per_s_quantiles
            real = np.array([self.speeds[knobs, load] for knobs in chosen])
            errors.append(np.abs(middle / real - 1.0))
            inside.append((low <= real) & (real <= high))
        return float(np.median(np.concatenate(errors))), float(np.concatenate(inside).mean())


@pytest.fixture(scope="module")
def grid() -> Grid:
    taken = defaultdict(list)
    for one in GRID:
        if one.measurement.failure is None:
            load = dataclasses.replace(one.workload, prompts="grid")
            taken[one.knobs, load].append(one.measurement)
    told: dict[Knobs, list[TermObservation | AcceptanceCounts]] = defaultdict(list)
    for (knobs, load), repeats in taken.items():
        for name in repeats[0].terms_ms:
            value = float(np.median([r.terms_ms[name] for r in repeats]))
            if value > 0:
                told[knobs].append(
                    TermObservation(
                        knobs=knobs, workload=load, term=name, value_ms=value, rel_sd=0.03
                    )
                )
        counts = repeats[0].acceptance
        if counts is not None:
            told[knobs].append(
                AcceptanceCounts(
                    steps=knobs.steps,
                    topk=knobs.topk,
                    draft_tokens=knobs.draft_tokens,
                    num_verifies=counts.num_verifies,
                    accepted_by_depth=counts.accepted_by_depth,
                    concurrency=load.concurrency,
                )
            )
    speeds = {
        key: float(np.median([r.tokens_per_s for r in repeats])) for key, repeats in taken.items()
    }
    return Grid(speeds, told)


def test_the_grid_before_measuring(grid: Grid) -> None:
    error, held = grid.judged(predictor("tiny", 16), list(grid.told))
    assert error < 0.30
    assert 0.80 <= held <= 0.99


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_trials_tell_the_rest_of_the_grid(grid: Grid, seed: int) -> None:
    every = sorted(grid.told, key=lambda knobs: knobs.id)
    plain = next(knobs for knobs in every if knobs.method == "off")
    picked = np.random.default_rng(seed).choice(len(every), 8, replace=False)
    seen = list(dict.fromkeys([plain, *(every[i] for i in picked)]))
    fitted = predictor("tiny", 16).updated([o for knobs in seen for o in grid.told[knobs]])
    error, held = grid.judged(fitted, [knobs for knobs in every if knobs not in seen])
    assert error < 0.17
    assert held >= 0.80


def test_the_prompts_of_one_request_are_not_those_of_sixteen(grid: Grid) -> None:
    """One prompt of the grid is easier to draft for than the others: 3.8 tokens, not 2.4."""
    chains = [k for k in grid.told if k.method != "off" and k.topk == 1 and k.graph_verify]
    told = [o for knobs in chains for o in grid.told[knobs] if isinstance(o, AcceptanceCounts)]
    learnt = predictor("tiny", 16).acceptance.update(told)
    one, sixteen = (
        float(np.median(learnt.at(load).accept_length_samples(4, 1, 5))) for load in (1, 16)
    )
    assert one > 3.0
    assert sixteen == pytest.approx(2.4, abs=0.25)
