"""``bench/knob_effects.py``: pairs of recorded configurations that differ in one knob."""

import math
import sys

import numpy as np
import pytest
from contract_harness import ROOT

from model.spec import Knobs, Scalar

sys.path.insert(0, str(ROOT))
from bench.knob_effects import effects, pair_noise
from bench.replay_search import Truth


def space() -> dict[str, Knobs]:
    """Chains and trees of two depths, NCCL by two protocols, and plain decoding."""
    trees: list[dict[str, Scalar | None]] = [{"speculation.method": "off"}]
    for steps in (1, 3):
        tree = {"speculation.method": "eagle3", "speculation.steps": steps}
        trees += [
            {**tree, "speculation.topk": 1},
            {**tree, "speculation.topk": 4, "speculation.draft_tokens": 4},
        ]
    found = [
        Knobs.of({**tree, "parallel.tp": 2, "nccl.proto": proto})
        for tree in trees
        for proto in ("LL", "Simple")
    ]
    return {each.id: each for each in found}


def speed(knobs: Knobs) -> float:
    """Deeper is 1.5 times as fast, Simple 0.8, a tree 0.9; plain 0.5."""
    if knobs.method == "off":
        return 50.0 * (0.8 if knobs.values()["nccl.proto"] == "Simple" else 1.0)
    found = 100.0 * (1.5 if knobs.steps == 3 else 1.0) * (0.9 if knobs.topk > 1 else 1.0)
    return found * (0.8 if knobs.values()["nccl.proto"] == "Simple" else 1.0)


def test_an_effect_is_the_ratio_where_every_other_knob_is_equal() -> None:
    knobs = space()
    scores = {each: math.log(speed(found)) for each, found in knobs.items()}
    table = {(e.knob, e.value): e for e in effects(knobs, scores)}
    simple = table["nccl.proto", "Simple"]
    assert (simple.num_pairs, simple.against) == (5, "LL")
    assert simple.ratio == pytest.approx(0.8)
    assert simple.best_share == pytest.approx(0.8)
    # a chain's draft tokens follow from its steps: they keep no pair apart
    deep = table["speculation.steps", 3]
    assert deep.num_pairs == 4
    assert [deep.lowest, deep.ratio, deep.highest] == pytest.approx([1.5] * 3)
    assert table["speculation.steps", 1].ratio is None
    assert table["speculation.method", "off"].best_share == pytest.approx(1 / 3)
    assert "parallel.tp" not in {knob for knob, _ in table}


def test_nccls_knobs_are_judged_where_nccl_carries_and_slow_configurations_may_be_left_out() -> (
    None
):
    knobs = space()
    ours = [
        Knobs.of({**each.values(), "collectives.backend": "one_shot", "nccl.proto": "auto"})
        for each in knobs.values()
        if each.values()["nccl.proto"] == "LL"
    ]
    scores = {each: math.log(speed(found)) for each, found in knobs.items()}
    scores |= {each.id: math.log(200.0) for each in ours}
    knobs |= {each.id: each for each in ours}
    table = {(e.knob, e.value): e for e in effects(knobs, scores)}
    assert ("nccl.proto", "auto") not in table
    assert table["nccl.proto", "LL"].best_share == pytest.approx(150 / 200)
    assert table["collectives.backend", "one_shot"].best_share == 1.0
    few = effects(knobs, scores, 0.5)
    assert all(e.best_share >= 0.5 for e in few)
    # of the 5 pairs of protocols both are fast enough in 2
    assert next(e for e in few if (e.knob, e.value) == ("nccl.proto", "Simple")).num_pairs == 2


def test_a_smaller_space_is_judged_by_its_own_best() -> None:
    knobs = space()
    truth = Truth(knobs, {each: {1: speed(found)} for each, found in knobs.items()})
    slow = {each for each, found in knobs.items() if found.values()["nccl.proto"] == "Simple"}
    part = truth.within(slow)
    assert set(part.knobs) == slow
    assert max(part.shares().values()) == 1.0
    assert max(share for each, share in truth.shares().items() if each in slow) < 1.0


def test_a_knob_without_effect_is_within_noise_and_one_with_it_is_not() -> None:
    knobs = space()
    draws = np.random.default_rng(0)
    repeats, scores = [], {}
    for each, found in knobs.items():
        flat = speed(found) / (0.8 if found.values()["nccl.proto"] == "Simple" else 1.0)
        cell = tuple(float(flat * math.exp(draws.normal(0, 0.01))) for _ in range(3))
        repeats.append(cell)
        scores[each] = math.log(sorted(cell)[1])
    noise = pair_noise(repeats)
    table = {(e.knob, e.value): e for e in effects(knobs, scores)}
    assert not table["nccl.proto", "Simple"].matters(noise)
    assert table["speculation.steps", 3].matters(noise)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_noise_of_a_pair_is_that_of_two_means_whatever_a_few_cells_do(count: int) -> None:
    draws = np.random.default_rng(count)
    cells = [tuple(np.exp(draws.normal(3, 0.02, count)).tolist()) for _ in range(400)]
    cells[:20] = [(1.0,) * (count - 1) + (9.0,)] * 20
    assert pair_noise(cells) == pytest.approx(0.02 * math.sqrt(2 / count), rel=0.2)
    assert pair_noise([(1.0,), (2.0,)]) == 0.0
