"""Robust maximum a posteriori fit of constants in log space, for many constants and few rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of a robust MAP fit: x [K], covariance [K, K], residuals in log units [N]."""

    x: Array
    covariance: Array
    residuals: Array
    #: what was minimised: robust misfit plus distance from the prior
    cost: float


def robust_map(
    predict: Callable[[Array], Array],
    observed_N: Array,
    rel_sd_N: Array,
    x0_K: Array,
    precision_KK: Array,
    *,
    start_K: Array | None = None,
    degrees: float = 4.0,
    iterations: int = 25,
) -> Fit:
    """Gauss-Newton with Student-t weights: minimises prior + sum of t residuals in log space.

    ``predict(x_DK) -> [D, N]`` gives the predicted (positive) values of all observations for D
    constant vectors at once; ``rel_sd_N`` is the standard deviation of log(observed).
    """
    log_observed = np.log(observed_N)
    num = x0_K.size
    delta = 1e-4
    probes = np.concatenate([np.zeros((1, num)), delta * np.eye(num)])
    weight_floor = degrees + 1.0

    def cost(residual: Array, x: Array) -> float:
        t = 0.5 * weight_floor * np.log1p((residual / rel_sd_N) ** 2 / degrees).sum()
        d = x - x0_K
        return float(t + 0.5 * d @ precision_KK @ d)

    x = (x0_K if start_K is None else start_K).copy()
    log_DN = np.log(predict(x + probes))
    residual = log_observed - log_DN[0]
    current = cost(residual, x)
    damping = 1e-3
    for _ in range(iterations):
        jacobian = ((log_DN[1:] - log_DN[0]) / delta).T
        weight = weight_floor / (degrees + (residual / rel_sd_N) ** 2) / rel_sd_N**2
        normal = jacobian.T @ (jacobian * weight[:, None]) + precision_KK
        gradient = jacobian.T @ (weight * residual) + precision_KK @ (x0_K - x)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        step *= min(1.0, 1.5 / max(np.abs(step).max(), 1e-12))
        trial_DN = np.log(predict(x + step + probes))
        trial = cost(log_observed - trial_DN[0], x + step)
        if trial <= current + 1e-12:
            gain = current - trial
            x, log_DN, current = x + step, trial_DN, trial
            residual = log_observed - log_DN[0]
            damping = max(damping / 5, 1e-9)
            if gain < 1e-4 * max(1.0, current):
                break
        else:
            damping *= 8
            if damping > 1e6:
                break
    jacobian = ((log_DN[1:] - log_DN[0]) / delta).T
    weight = weight_floor / (degrees + (residual / rel_sd_N) ** 2) / rel_sd_N**2
    normal = jacobian.T @ (jacobian * weight[:, None]) + precision_KK
    return Fit(x, np.linalg.inv(normal), residual, current)
