"""Kendall's S of long series: as exact as counting every pair, without the pairs."""

import numpy as np
import pytest

from autotune.patterns import _concordance, drifts, is_bimodal


@pytest.mark.parametrize("n", [1, 2, 64, 65, 130, 1001])
def test_rising_minus_falling_pairs_equal_a_count_of_every_pair(n: int) -> None:
    # few distinct values, so that ties are common
    values = np.random.default_rng(n).integers(0, 40, n).astype(float)
    rising = sum(np.sign(values[i + 1 :] - values[i]).sum() for i in range(n))
    assert _concordance(values) == rising


def test_a_drift_in_ten_thousand_repeats_is_seen_and_noise_is_not() -> None:
    noise = np.random.default_rng(0).normal(100.0, 5.0, 10_000)
    assert not drifts(noise)
    assert drifts(noise + np.linspace(0.0, 1.0, 10_000))


@pytest.mark.parametrize("n", [6, 9, 30])
def test_a_perfect_line_drifts(n: int) -> None:
    # what rounding leaves of it correlates by itself
    assert drifts(2000.0 - 20.0 * np.arange(n))
    assert drifts(0.1 * np.arange(n))


def test_few_values_that_recur_are_no_two_modes() -> None:
    # three recorded repeats, drawn again and again
    assert not is_bimodal(np.array([0.231, 0.231, 0.235, 0.231, 0.235, 0.2351, 0.231, 0.235]))
    assert is_bimodal(np.array([0.231, 0.2312, 0.315, 0.231, 0.3148, 0.3151, 0.231, 0.315]))
