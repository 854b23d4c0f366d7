"""Intervals cover what they claim, and comparisons do not see what is not there."""

import math

import numpy as np
import pytest

from autotune.statistics import median_ratio, noise_floor, paired_ratio, summarise


@pytest.mark.parametrize("n", [3, 4, 5, 6, 12])
@pytest.mark.parametrize("tails", ["normal", "student-t"])
def test_the_interval_of_the_median_covers_about_95_percent(n: int, tails: str) -> None:
    rng = np.random.default_rng(n)
    trials = 400
    hits = 0
    for trial in range(trials):
        noise = rng.standard_normal(n) if tails == "normal" else rng.standard_t(3, n)
        summary = summarise((100 + noise).tolist(), seed=trial)
        hits += summary.low <= 100 <= summary.high
    # 400 trials: standard error 1.1 %
    assert 0.915 <= hits / trials <= 0.985


def test_two_equal_arms_are_rarely_called_different() -> None:
    rng = np.random.default_rng(5)
    false = 0
    for trial in range(300):
        first, second = (100 * np.exp(0.02 * rng.standard_normal((2, 6)))).tolist()
        false += paired_ratio(first, second, seed=trial).verdict(0.0) in ("faster", "slower")
    assert false / 300 <= 0.09


def test_a_clear_difference_is_seen_and_one_inside_the_floor_is_not() -> None:
    rng = np.random.default_rng(6)
    base = (100 * np.exp(0.01 * rng.standard_normal(8))).tolist()
    other = (130 * np.exp(0.01 * rng.standard_normal(8))).tolist()
    ratio = paired_ratio(other, base)
    assert ratio.verdict(0.05) == "faster"
    assert ratio.verdict(0.5) == "same"
    assert paired_ratio(base, other).verdict(0.05) == "slower"
    assert 1.25 < ratio.low < ratio.median < ratio.high < 1.35


def test_pairing_cancels_a_drift_that_unpaired_medians_see() -> None:
    drift = np.linspace(1.0, 0.7, 8)
    first, second = (100 * drift).tolist(), (100 * drift * 0.999).tolist()
    paired, pooled = paired_ratio(first, second), median_ratio(first, second)
    assert math.log(paired.high / paired.low) < 0.01 < math.log(pooled.high / pooled.low)


def test_the_noise_floor_grows_with_the_noise() -> None:
    rng = np.random.default_rng(7)
    floors = []
    for cv in (0.005, 0.05):
        first, second = (100 * np.exp(cv * rng.standard_normal((2, 8)))).tolist()
        floors.append(noise_floor(first, second))
    assert floors[0] < 0.02 < floors[1]


def test_drift_and_two_modes_are_flagged_and_plain_noise_is_not() -> None:
    rng = np.random.default_rng(8)
    plain = [summarise((100 + rng.standard_normal(10)).tolist()) for _ in range(300)]
    assert sum(summary.drifts for summary in plain) <= 9
    assert sum(summary.bimodal for summary in plain) <= 9
    assert summarise(np.linspace(100, 90, 10).tolist()).drifts
    assert summarise([100, 80.2, 100.3, 80, 99.8, 80.1]).bimodal


def test_one_repeat_has_no_interval_and_none_is_refused() -> None:
    assert math.isinf(summarise([3.0]).rel_half_width)
    with pytest.raises(ValueError, match="no repeats"):
        summarise([])
    with pytest.raises(ValueError, match="equal lengths"):
        paired_ratio([1.0], [1.0, 2.0])


def test_an_interval_of_positive_values_stays_positive() -> None:
    few = summarise([136.6, 40.0, 150.0])
    assert few.low >= 0
    assert few.low < 40.0
    # differences may lie on either side
    assert summarise([-3.0, 1.0, 2.0]).low < -3.0
