"""The paired tests keep their error whatever the noise, and the patterns are told apart."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from autotune.comparison import Comparison, decide, pair_order
from autotune.patterns import drifts, is_bimodal, warms_up
from autotune.signflip import ALPHA, SequentialTest, fixed_interval, pairs_for
from autotune.statistics import bootstrap_ratio, median_ratio

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = ROOT / "bench" / "false_positives.py"
    spec = importlib.util.spec_from_file_location("false_positives", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["heavy tails", "two host speeds", "AR drift", "all of these"])
def test_equal_arms_are_called_different_in_at_most_5_percent(bench: ModuleType, kind: str) -> None:
    found = bench.sequential(kind, 0.0, comparisons=200, max_pairs=20, seed=7)
    # 200 comparisons of a test with 3.4 %: standard error 1.3 %
    assert found.different <= 0.06


def test_a_real_difference_is_found_and_costs_fewer_pairs_when_it_is_large(
    bench: ModuleType,
) -> None:
    small = bench.sequential("jitter, cv 1.5 %", 0.02, comparisons=60, max_pairs=30, seed=3)
    large = bench.sequential("jitter, cv 1.5 %", 0.10, comparisons=60, max_pairs=30, seed=3)
    assert small.faster >= 0.9
    assert large.faster == 1.0
    assert large.mean_pairs < small.mean_pairs < 25


def test_peeking_with_a_plain_test_would_raise_the_error_far_above_5_percent(
    bench: ModuleType,
) -> None:
    assert bench.repeated_t_test("jitter, cv 1.5 %", 200, 30, seed=0) > 0.12


@pytest.mark.parametrize("kind", ["heavy tails", "trend -10 %", "AR drift"])
@pytest.mark.parametrize("num_pairs", [4, 6])
def test_a_studys_final_comparison_of_equal_arms_rarely_claims(
    bench: ModuleType, kind: str, num_pairs: int
) -> None:
    found = bench.final(kind, 0.0, comparisons=300, seed=11, num_pairs=num_pairs)
    assert found.different <= 0.05


@pytest.mark.parametrize("n", [6, 8, 12])
def test_the_exact_interval_covers_the_truth(n: int) -> None:
    rng = np.random.default_rng(n)
    hits = 0
    for _ in range(1000):
        interval = fixed_interval(0.3 + rng.standard_t(2, n))
        hits += interval.low <= 0.3 <= interval.high
    assert hits / 1000 >= 1 - ALPHA - 0.015


@pytest.mark.parametrize("n", [2, 5])
def test_too_few_pairs_have_no_interval(n: int) -> None:
    interval = fixed_interval(np.full(n, 0.2) + 0.001 * np.arange(n))
    assert interval.low == -np.inf
    assert interval.high == np.inf
    assert decide([1.3] * n, [1.0] * n, 0.01).verdict == "undecided"


def test_interval_and_verdict_never_contradict_each_other() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        test = SequentialTest(20)
        values = 0.01 + 0.02 * rng.standard_normal(20)
        for n in range(6, 21, 2):
            seen = test.look(values[:n])
            # the estimate lies in its interval, whatever the look
            assert seen.low <= seen.median <= seen.high


def test_a_look_must_see_more_and_not_more_than_planned() -> None:
    test = SequentialTest(8)
    test.look(np.arange(1.0, 7.0))
    with pytest.raises(ValueError, match="look at 6 pairs after 6 of 8"):
        test.look(np.arange(1.0, 7.0))
    with pytest.raises(ValueError, match="look at 9 pairs"):
        test.look(np.arange(1.0, 10.0))
    with pytest.raises(ValueError, match="at least 6"):
        SequentialTest(5)


def test_arms_that_differ_by_less_than_the_margin_are_the_same() -> None:
    rng = np.random.default_rng(2)
    base = 100 * np.exp(0.004 * rng.standard_normal(30))
    other = 100.1 * np.exp(0.004 * rng.standard_normal(30))
    assert decide(other.tolist(), base.tolist(), 0.01).verdict == "same"
    # the same numbers do not support "same within 0.1 %"
    assert decide(other.tolist(), base.tolist(), 0.001).verdict == "undecided"


def test_the_order_inside_pairs_is_a_fair_coin_and_repeatable() -> None:
    orders = [pair_order(5, number)[0] for number in range(400)]
    assert orders == [pair_order(5, number)[0] for number in range(400)]
    assert 0.4 < np.mean(orders) < 0.6
    assert len({tuple(orders[i : i + 4]) for i in range(0, 400, 4)}) == 16


def test_pairs_needed_fall_with_the_square_of_the_precision() -> None:
    assert pairs_for(0.04, 10, 0.02) == pytest.approx(10 * (0.04 / np.log(1.02)) ** 2, abs=1)
    assert pairs_for(0.0001, 10, 0.02) == 6


def test_the_comparison_stops_at_a_clear_answer() -> None:
    comparison = Comparison(30, 0.01)
    used = next(n for n in range(1, 31) if comparison.add(130.0 + n % 3, 100.0 + n % 2))
    assert used == 8
    assert comparison.decision().verdict == "faster"
    assert comparison.decision().ratio.low > 1.2


def test_the_block_bootstrap_covers_the_ratio_of_medians() -> None:
    rng = np.random.default_rng(9)
    hits = 0
    for trial in range(300):
        first = 120 * np.exp(0.02 * rng.standard_normal(12))
        second = 100 * np.exp(0.02 * rng.standard_normal(12))
        ratio = bootstrap_ratio(first.tolist(), second.tolist(), block=2, seed=trial)
        hits += ratio.low <= 1.2 <= ratio.high
    assert 0.91 <= hits / 300 <= 0.99


# patterns of a series


def _share(rule: object, draw: object, n: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    return float(np.mean([bool(rule(draw(rng, n))) for _ in range(300)]))  # type: ignore[operator]


def _contaminated(rng: np.random.Generator, n: int) -> np.ndarray:
    values = rng.standard_normal(n)
    values[rng.random(n) < 0.05] -= 5 * (1 + rng.pareto(2.5))
    return values


_STATIONARY = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "student-t(2)": lambda rng, n: rng.standard_t(2, n),
    "outliers": _contaminated,
}


@pytest.mark.parametrize("noise", _STATIONARY)
@pytest.mark.parametrize("n", [8, 12, 40])
@pytest.mark.parametrize("rule", [drifts, warms_up, is_bimodal], ids=lambda rule: rule.__name__)
def test_stationary_noise_shows_no_pattern(rule: object, n: int, noise: str) -> None:
    assert _share(rule, _STATIONARY[noise], n, seed=n) <= 0.05


@pytest.mark.parametrize(
    ("rule", "draw", "n", "at_least"),
    [
        pytest.param(
            drifts, lambda rng, n: rng.standard_normal(n) + np.linspace(0, 4, n), 20, 0.8,
            id="trend",
        ),
        pytest.param(
            drifts, lambda rng, n: np.cumsum(rng.standard_normal(n)), 30, 0.6, id="random-walk"
        ),
        pytest.param(
            warms_up, lambda rng, n: rng.standard_normal(n) - 6 * (np.arange(n) < 4), 40, 0.9,
            id="first-four-slow",
        ),
        pytest.param(
            is_bimodal, lambda rng, n: rng.standard_normal(n) + 6 * (rng.random(n) < 0.5), 40, 0.6,
            id="two-modes",
        ),
        pytest.param(
            is_bimodal, lambda rng, n: rng.standard_normal(n) + 12 * (rng.random(n) < 0.4), 12, 0.6,
            id="two-modes-far-apart",
        ),
    ],
)  # fmt: skip
def test_patterns_are_found(rule: object, draw: object, n: int, at_least: float) -> None:
    assert _share(rule, draw, n, seed=1) >= at_least


def test_the_number_of_warm_up_repeats_is_told() -> None:
    rng = np.random.default_rng(4)
    values = 100 + rng.standard_normal(24)
    values[:4] -= 20
    assert 4 <= warms_up(values) <= 6


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_speed_is_refused_before_it_can_decide_anything(value: float) -> None:
    whole = Comparison(8, 0.01)
    with pytest.raises(ValueError, match="is no measured speed"):
        whole.add(value, 1.0)
    assert not whole.first
    with pytest.raises(ValueError, match="is no measured speed"):
        decide([1.0] * 7, [1.0] * 6 + [value], 0.01)


def test_constant_arms_are_the_same_or_apart_by_exactly_their_ratio() -> None:
    same = decide([5.0] * 8, [5.0] * 8, 0.01)
    assert (same.verdict, same.ratio.low, same.ratio.high) == ("same", 1.0, 1.0)
    apart = decide([5.0] * 8, [6.0] * 8, 0.01)
    assert apart.verdict == "slower"
    assert apart.ratio.low == pytest.approx(5 / 6)
    assert apart.ratio.high == pytest.approx(5 / 6)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 12])
@pytest.mark.parametrize("noise", ["normal", "heavy tails"])
def test_the_unpaired_ratio_of_medians_covers_its_truth(n: int, noise: str) -> None:
    """Two server starts, a few repeats each: the interval that `autotune diff` gives."""
    rng = np.random.default_rng(n)
    rounds, hits = 300, 0
    for seed in range(rounds):
        draws = rng.standard_normal((2, n)) if noise == "normal" else rng.standard_t(3, (2, n))
        arms = np.exp(0.03 * draws) * np.array([[104.0], [100.0]])
        ratio = median_ratio(arms[0].tolist(), arms[1].tolist(), seed)
        hits += ratio.low <= 1.04 <= ratio.high
    assert hits / rounds >= 0.94
