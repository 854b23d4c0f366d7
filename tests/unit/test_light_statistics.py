"""The light stand-ins for scipy functions give the same values."""

import numpy as np
import pytest
from scipy import special, stats

from autotune.ranks import rankdata
from model.normal import ndtr, ndtri, normal_pdf


@pytest.mark.parametrize("shape", [(), (7,), (3, 5)], ids=str)
def test_normal_functions_agree_with_scipy_and_keep_the_shape(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    z = rng.normal(0.0, 6.0, shape)
    share = rng.uniform(1e-12, 1.0, shape)
    for ours, theirs in (
        (ndtr(z), special.ndtr(z)),
        (ndtri(share), special.ndtri(share)),
        (normal_pdf(z), stats.norm.pdf(z)),
    ):
        assert ours.shape == shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-300)


def test_normal_tails_keep_their_digits() -> None:
    z = np.array([-37.0, -8.0, 8.0])
    np.testing.assert_allclose(ndtr(z), special.ndtr(z), rtol=1e-13)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_outside_0_to_1_has_no_quantile(share: float) -> None:
    with pytest.raises(ValueError, match="range"):
        ndtri(share)


@pytest.mark.parametrize("distinct", [2, 5, 1000], ids=lambda n: f"{n} values")
def test_ranks_agree_with_scipy_with_ties(distinct: int) -> None:
    values = np.random.default_rng(distinct).integers(0, distinct, 200).astype(float)
    np.testing.assert_array_equal(rankdata(values), stats.rankdata(values))


def test_values_without_an_order_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        rankdata([1.0, float("nan")])


@pytest.mark.parametrize("share", [0.05, 0.4, 0.9])
def test_few_mixtures_one_by_one_equal_many_from_the_table(share: float) -> None:
    from model.intervals import mixture_quantiles

    rng = np.random.default_rng(3)
    fast, sd_fast, sd_slow = rng.normal(0, 1, 200), rng.uniform(0.01, 0.3, 200), 0.1
    slow = fast + rng.uniform(0.0, 2.0, 200)
    many = mixture_quantiles(fast, sd_fast, slow, sd_slow, share)
    few = [
        mixture_quantiles(fast[i : i + 8], sd_fast[i : i + 8], slow[i : i + 8], sd_slow, share)
        for i in range(0, 200, 8)
    ]
    np.testing.assert_allclose(np.concatenate(few, axis=1), many, rtol=1e-9)
