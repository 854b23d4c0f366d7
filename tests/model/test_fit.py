"""The robust fit: recovers constants, ignores outliers, says what the data cannot tell."""

import numpy as np
import pytest

from model.fit import ConstantSpec, fit, log_jacobian

SPECS = (
    ConstantSpec("fixed", "us", 5.0, 0.5, "test"),
    ConstantSpec("rate", "GB/s", 10.0, 0.5, "test"),
    ConstantSpec("unused", "us", 3.0, 0.4, "test"),
)
SIZES = np.geomspace(1e3, 1e8, 40)


def predict(theta: np.ndarray) -> np.ndarray:
    """log of fixed + size / rate, batched."""
    return np.log(theta[..., 0:1] + SIZES / (1e3 * theta[..., 1:2]))[..., :]


def rows(seed: int, sigma: float = 0.02) -> np.ndarray:
    truth = np.array([7.5, 23.0, 3.0])
    noise = np.random.default_rng(seed).normal(0.0, sigma, len(SIZES))
    return predict(truth) + noise


def test_constants_are_recovered_within_their_posterior() -> None:
    result = fit(SPECS, predict, rows(1), 0.02, batched=True)
    errors = np.log(result.theta / [7.5, 23.0, 3.0]) / np.sqrt(np.diag(result.covariance))
    assert result.converged
    assert np.abs(errors[:2]).max() < 3.0
    assert np.allclose(result.theta[:2], [7.5, 23.0], rtol=0.03)


def test_a_constant_without_data_stays_at_its_prior_and_is_named() -> None:
    result = fit(SPECS, predict, rows(2), 0.02, batched=True)
    assert result.unidentifiable == ("unused",)
    assert result.identifiability[2] == pytest.approx(1.0)
    assert result.constants["unused"] == pytest.approx(3.0)


def test_outliers_do_not_move_the_robust_fit() -> None:
    spoiled = rows(3)
    spoiled[::8] += 1.5
    robust = fit(SPECS, predict, spoiled, 0.02, batched=True)
    plain = fit(SPECS, predict, spoiled, 0.02, robust=False, batched=True)
    truth = np.log([7.5, 23.0])
    assert np.abs(np.log(robust.theta[:2]) - truth).max() < 0.03
    assert np.abs(np.log(plain.theta[:2]) - truth).max() > 0.1
    assert robust.weights[::8].max() < 0.05 < np.delete(robust.weights, np.s_[::8]).min()


def test_noise_above_sigma_widens_the_covariance() -> None:
    quiet = fit(SPECS, predict, rows(4, 0.02), 0.02, batched=True)
    loud = fit(SPECS, predict, rows(4, 0.10), 0.02, batched=True)
    assert loud.noise_scale > 3.0
    assert loud.covariance[1, 1] > 4.0 * quiet.covariance[1, 1]


def test_a_posterior_as_prior_gives_what_all_rows_at_once_give() -> None:
    data = rows(5)
    first = fit(SPECS, lambda t: predict(t)[..., :20], data[:20], 0.02, False, batched=True)
    moved = [
        ConstantSpec(s.name, s.unit, float(v), s.prior_log_sd, s.source)
        for s, v in zip(SPECS, first.theta, strict=True)
    ]
    second = fit(
        moved, lambda t: predict(t)[..., 20:], data[20:], 0.02, False,
        prior_covariance=first.covariance, batched=True,
    )  # fmt: skip
    together = fit(SPECS, predict, data, 0.02, False, batched=True)
    assert np.allclose(second.theta, together.theta, rtol=0.01)


def test_jacobian_is_the_derivative_by_log_constants() -> None:
    theta = np.array([7.5, 23.0, 3.0])
    _, jacobian = log_jacobian(predict, theta, batched=True)
    time_us = np.exp(predict(theta))
    assert np.allclose(jacobian[:, 0], 7.5 / time_us, atol=1e-3)
    assert np.allclose(jacobian[:, 2], 0.0)


def test_a_thousand_rows_and_twenty_constants_take_a_few_predictions() -> None:
    # `make bench-model` holds an update's 100 ms; predicting is what it spends them on
    sizes = np.geomspace(1e3, 1e8, 1000)
    specs = [ConstantSpec(f"c{i}", "us", 5.0, 0.5, "test") for i in range(20)]

    asked: list[int] = []

    def many(theta: np.ndarray) -> np.ndarray:
        asked.append(len(theta))
        return np.log(theta @ (1.0 + np.sin(np.outer(np.arange(1, 21), np.log(sizes))) ** 2))

    observed = many(np.linspace(2.0, 9.0, 20)[None])[0]
    asked.clear()
    assert fit(specs, many, observed, 0.02, batched=True).converged
    # all constants' derivatives in one call, and about five steps of them
    assert len(asked) <= 16
    assert max(asked) == 1 + len(specs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"specs": SPECS + SPECS[:1]}, "distinct", id="same-name-twice"),
        pytest.param({"specs": ()}, "named", id="no-constants"),
        pytest.param({"observed": np.full(40, np.nan)}, "finite", id="nan-times"),
        pytest.param({"sigma": 0.0}, "sigma", id="zero-sigma"),
        pytest.param({"observed": np.zeros(3)}, "shape", id="row-count-differs"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], words: str) -> None:
    values = {"specs": SPECS, "observed": rows(6), "sigma": 0.02} | change
    with pytest.raises(ValueError, match=words):
        fit(values["specs"], predict, values["observed"], values["sigma"], batched=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("prior", [0.0, -1.0, float("nan")])
def test_a_prior_that_is_not_positive_is_refused_with_name_and_unit(prior: float) -> None:
    with pytest.raises(ValueError, match=r"hop.*us"):
        ConstantSpec("hop", "us", prior, 0.3, "test")
