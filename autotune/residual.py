"""Gaussian process over measured knobs: corrects the model where measurements disagree with it.

Two processes are fitted to log tok/s: one on the residual to the prediction, one that ignores the
prediction. Their leave-one-out predictive densities weigh them, so that a model that misleads
loses its say (reference/speculation.md 2.3, findings 1 and 4).
Legend: N measured knobs, M candidates, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.normal import ndtr, normal_pdf
from model.spec import Knobs, Scalar

Array = NDArray[np.float64]

_LENGTHS = (0.5, 1.0, 2.0, 4.0)
#: how much more or less than the rest one feature may matter, and the log likelihood to ask for it
_RELEVANCE = (0.2, 4.0)
_RELEVANCE_GAIN = 0.5
#: prior standard deviations of the process, in log tok/s
_RESIDUAL_SCALES = (0.03, 0.08, 0.2)
_PLAIN_SCALES = (0.1, 0.25, 0.6)
_MIN_NOISE = 0.003


def encode(knobs_list: Sequence[Knobs]) -> Array:
    """Features of knobs, [N, F]: log2 for numbers, one column per text value, 0/1 for flags."""
    rows = [knobs.values() for knobs in knobs_list]
    names = sorted({name for row in rows for name in row})
    columns: list[list[float]] = []
    for name in names:
        values: list[Scalar | None] = [row.get(name) for row in rows]
        if any(isinstance(value, str) for value in values):
            # sqrt(1/2) a column makes two different words one unit apart
            for word in sorted({str(value) for value in values}):
                columns.append([float(str(value) == word) * 0.5**0.5 for value in values])
            continue
        numbers = [0.0 if value is None else np.log2(1.0 + float(value)) for value in values]
        columns.append(numbers)
        if any(value is None for value in values):
            columns.append([float(value is None) for value in values])
    matrix = np.asarray(columns, dtype=float).T.reshape(len(rows), -1)
    return matrix[:, np.ptp(matrix, axis=0) > 0] if len(rows) else matrix


@dataclass(frozen=True)
class Belief:
    """Mean and standard deviation of log tok/s of each candidate, [M]."""

    mean: Array
    sd: Array

    def expected_improvement(self, best: float) -> Array:
        """Mean gain over ``best`` (log tok/s), counting losses as nothing."""
        gap = self.mean - best
        z = gap / self.sd
        gain: Array = gap * ndtr(z) + self.sd * normal_pdf(z)
        return gain


@dataclass(frozen=True)
class _Fit:
    mean: Array
    sd: Array
    #: mean leave-one-out log predictive density
    score: float


def believe(
    features_MF: Array,
    measured_N: Sequence[int],
    log_values_N: Array,
    log_sd_N: Array,
    log_predicted_M: Array | None,
    prior_sd_M: Array | None = None,
) -> Belief:
    """Belief about every candidate from those measured.

    ``measured_N`` are rows of ``features_MF``; ``log_sd_N`` the standard errors of the measured
    values. Without measurements the prediction is returned with its own spread.
    """
    num = len(features_MF)
    spread = prior_sd_M if prior_sd_M is not None else np.full(num, 0.15)
    if not len(measured_N):
        centre = log_predicted_M if log_predicted_M is not None else np.zeros(num)
        return Belief(mean=centre, sd=np.maximum(spread, 0.01))
    rows = np.asarray(measured_N, dtype=int)
    noise = np.maximum(log_sd_N, _MIN_NOISE)
    plain = _fit(features_MF, rows, log_values_N, noise, _PLAIN_SCALES)
    if log_predicted_M is None:
        return Belief(mean=plain.mean, sd=plain.sd)
    residual_N = log_values_N - log_predicted_M[rows]
    informed = _fit(features_MF, rows, residual_N, noise, _RESIDUAL_SCALES)
    informed = _Fit(log_predicted_M + informed.mean, informed.sd, informed.score)
    if len(rows) < 4:
        return Belief(mean=informed.mean, sd=informed.sd)
    evidence = np.array([informed.score, plain.score]) * len(rows)
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()
    mean = weights[0] * informed.mean + weights[1] * plain.mean
    second = weights[0] * (informed.sd**2 + informed.mean**2)
    second += weights[1] * (plain.sd**2 + plain.mean**2)
    return Belief(mean=mean, sd=np.sqrt(np.maximum(second - mean**2, 1e-8)))


def _fit(
    features_MF: Array,
    rows: NDArray[np.int_],
    values_N: Array,
    noise_N: Array,
    scales: tuple[float, ...],
) -> _Fit:
    """Process at the best marginal likelihood over scale and one length per feature.

    Lengths: a common one first, then one pass over the features, each of which may matter more or
    less than the rest. The constant mean is estimated (generalised least squares).
    """
    x_N = features_MF[rows]
    best, length, scale = -np.inf, _LENGTHS[0], scales[0]
    for candidate in _LENGTHS:
        shape = _matern(x_N / candidate, x_N / candidate)
        for size in scales:
            likelihood = _log_likelihood(size**2 * shape, values_N, noise_N)
            if likelihood > best:
                best, length, scale = likelihood, candidate, size
    weights_F = np.full(x_N.shape[1], 1.0 / length)
    for feature in range(x_N.shape[1]):
        for factor in _RELEVANCE:
            trial_F = weights_F.copy()
            trial_F[feature] *= factor
            shape = _matern(x_N * trial_F, x_N * trial_F)
            likelihood = _log_likelihood(scale**2 * shape, values_N, noise_N)
            if likelihood > best + _RELEVANCE_GAIN:
                best, weights_F = likelihood, trial_F
    # here and below: most commands read this module's callers without fitting anything
    from scipy.linalg import cho_factor, cho_solve

    x_N, all_MF = x_N * weights_F, features_MF * weights_F
    covariance = scale**2 * _matern(x_N, x_N) + np.diag(noise_N**2)
    factor_NN = cho_factor(covariance, lower=True)
    inverse = cho_solve(factor_NN, np.eye(len(rows)))
    ones = np.ones(len(rows))
    precision = float(ones @ inverse @ ones)
    centre = float(ones @ inverse @ values_N) / precision
    alpha = inverse @ (values_N - centre)
    cross = scale**2 * _matern(all_MF, x_N)
    mean = centre + cross @ alpha
    variance = scale**2 - np.einsum("mn,nk,mk->m", cross, inverse, cross, optimize=True)
    variance += 1.0 / precision
    diagonal = np.diag(inverse)
    loo_error, loo_variance = alpha / diagonal, 1.0 / diagonal
    score = float(np.mean(-0.5 * (np.log(2 * np.pi * loo_variance) + loo_error**2 / loo_variance)))
    return _Fit(mean=mean, sd=np.sqrt(np.maximum(variance, 1e-8)), score=score)


def _log_likelihood(covariance: Array, values: Array, noise: Array) -> float:
    from scipy.linalg import cho_factor, cho_solve

    total = covariance + np.diag(noise**2)
    factor = cho_factor(total, lower=True)
    centred = values - values.mean()
    quadratic = float(centred @ cho_solve(factor, centred))
    return -0.5 * quadratic - float(np.log(np.diag(factor[0])).sum())


def _matern(a_MF: Array, b_NF: Array) -> Array:
    """Matérn 5/2 correlation of scaled features, [M, N]."""
    squared = (a_MF**2).sum(1)[:, None] + (b_NF**2).sum(1)[None, :] - 2.0 * a_MF @ b_NF.T
    r = np.sqrt(5.0 * np.maximum(squared, 0.0))
    matern: Array = (1.0 + r + r**2 / 3.0) * np.exp(-r)
    return matern
