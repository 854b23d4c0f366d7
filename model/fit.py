"""Robust maximum-a-posteriori fit of positive physical constants, with covariance.

Every constant is positive and has a log-normal prior: median ``prior``, standard deviation
``prior_log_sd`` of its logarithm (0.1 is about 10 %). Observations are times, compared in logs, so
a residual of 0.05 is about 5 %. Robust: beyond two sigma a row pulls with constant force
(Huber's loss: one best fit, no local ones), by iteratively reweighted Levenberg-Marquardt. The
posterior is the Laplace approximation, in log constants.

    result = fit(specs, predict, np.log(times), sigma=0.03)
    result.constants                     # name -> value
    result.log_sd(jacobian)              # sd of a prediction, from the constants alone
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
#: constants in natural units [C], or [K, C] when batched -> log predictions [N], or [K, N]
Predict = Callable[[Array], Array]

#: residual, in sigma, from which on a row pulls no harder
HUBER_SIGMA = 2.0
#: a constant whose posterior sd is above this share of its prior sd is not told by the data
NOT_IDENTIFIABLE = 0.7
_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class ConstantSpec:
    """A physical constant: its unit, log-normal prior (median, sd of the log) and source."""

    name: str
    unit: str
    prior: float
    prior_log_sd: float
    source: str
    #: physical limit: a share of a whole is at most 1
    most: float = np.inf

    def __post_init__(self) -> None:
        if not (np.isfinite(self.prior) and self.prior > 0):
            raise ValueError(f"constant {self.name}: prior {self.prior} {self.unit} must be > 0")
        if not (np.isfinite(self.prior_log_sd) and self.prior_log_sd > 0):
            raise ValueError(f"constant {self.name}: prior_log_sd {self.prior_log_sd} must be > 0")
        if self.prior > self.most:
            raise ValueError(f"constant {self.name}: prior {self.prior} is above {self.most}")


@dataclass(frozen=True, slots=True)
class FitResult:
    """Posterior of a fit. ``covariance`` [C, C] is of the log constants."""

    names: tuple[str, ...]
    #: [C] natural units
    theta: Array
    covariance: Array
    #: [C] posterior sd / prior sd: near 0 told by the data, near 1 still the prior
    identifiability: Array
    #: [N] log observed - log predicted
    residuals: Array
    #: [N] weight of each row, 1 for a row that fits, near 0 for an outlier
    weights: Array
    #: scale that the residuals have in units of ``sigma`` (robust), at least 1
    noise_scale: float
    converged: bool

    @property
    def constants(self) -> Mapping[str, float]:
        """Posterior medians by name."""
        return dict(zip(self.names, self.theta.tolist(), strict=True))

    @property
    def unidentifiable(self) -> tuple[str, ...]:
        """Constants that the data cannot tell: the posterior is (nearly) the prior."""
        flags = self.identifiability > NOT_IDENTIFIABLE
        return tuple(name for name, flag in zip(self.names, flags, strict=True) if flag)

    def log_sd(self, jacobian: Array) -> Array:
        """Standard deviation of log predictions [N] from their ``jacobian`` [N, C] (log-log)."""
        variance: Array = np.einsum("nc,cd,nd->n", jacobian, self.covariance, jacobian)
        return np.sqrt(variance)


def log_jacobian(predict: Predict, theta: Array, batched: bool = False) -> tuple[Array, Array]:
    """Log prediction [N] and its derivative [N, C] by the log of each constant (forward steps)."""
    count = len(theta)
    points = np.vstack([theta, theta * np.exp(_STEP * np.eye(count))])
    rows = predict(points) if batched else np.stack([predict(point) for point in points])
    return rows[0], ((rows[1:] - rows[0]) / _STEP).T


def fit(
    specs: Sequence[ConstantSpec],
    predict: Predict,
    log_observed: Array,
    sigma: float | Array,
    robust: bool = True,
    *,
    prior_covariance: Array | None = None,
    batched: bool = False,
    max_iterations: int = 60,
) -> FitResult:
    """Fit ``specs`` to ``log_observed`` [N] with residual sd ``sigma`` (scalar or [N], in logs).

    ``prior_covariance`` [C, C] (of the logs) replaces the diagonal of the specs: the posterior of
    an earlier fit, say. ``batched``: ``predict`` takes constants [K, C] and returns [K, N].
    Raises ``ValueError`` for empty specs, duplicate names, or values that are not finite.
    """
    names = tuple(spec.name for spec in specs)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"constants to fit must be named and distinct, got {list(names)}")
    log_observed = np.asarray(log_observed, dtype=np.float64)
    sd = np.broadcast_to(np.asarray(sigma, dtype=np.float64), log_observed.shape)
    if not (np.isfinite(log_observed).all() and np.isfinite(sd).all() and (sd > 0).all()):
        raise ValueError("observed times must be finite and positive, and sigma > 0 (log units)")
    centre = np.log([spec.prior for spec in specs])
    prior_sd = np.array([spec.prior_log_sd for spec in specs])
    # one step of the derivative below the limit, where the model still feels the constant
    limit = np.log([spec.most for spec in specs]) - 2 * _STEP
    precision = np.diag(prior_sd**-2)
    if prior_covariance is not None:
        precision = np.linalg.inv(prior_covariance)
        prior_sd = np.sqrt(np.diag(prior_covariance))

    def weigh(residuals: Array) -> Array:
        if not robust:
            return np.ones_like(residuals)
        return HUBER_SIGMA / np.maximum(np.abs(residuals / sd), HUBER_SIGMA)

    def cost(residuals: Array, shift: Array) -> float:
        size = np.abs(residuals / sd)
        loss = size**2
        if robust:
            loss = np.where(size > HUBER_SIGMA, 2 * HUBER_SIGMA * size - HUBER_SIGMA**2, loss)
        return float(loss.sum() + shift @ precision @ shift)

    x = centre.copy()
    log_pred, jacobian = log_jacobian(predict, np.exp(x), batched)
    if log_pred.shape != log_observed.shape or not np.isfinite(log_pred).all():
        raise ValueError(
            f"predict gave shape {log_pred.shape} for {log_observed.shape} rows, or a value that "
            "is not finite"
        )
    residuals = log_observed - log_pred
    now, damping, converged = cost(residuals, x - centre), 1e-3, False
    for _ in range(max_iterations):
        scaled = jacobian * (weigh(residuals) / sd**2)[:, None]
        hessian = jacobian.T @ scaled + precision
        gradient = scaled.T @ residuals - precision @ (x - centre)
        step = _solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        # a constant moves by at most a factor of e at a time: far away, the model is not linear
        step *= min(1.0, 1.0 / max(float(np.abs(step).max()), 1e-12))
        trial = np.minimum(x + step, limit)
        step = trial - x
        trial_pred = predict(np.exp(trial)[None])[0] if batched else predict(np.exp(trial))
        trial_residuals = log_observed - trial_pred
        trial_cost = cost(trial_residuals, trial - centre)
        if np.isfinite(trial_cost) and trial_cost <= now:
            small = now - trial_cost < 1e-5 * (1.0 + abs(now))
            promised = float(2.0 * gradient @ step - step @ hessian @ step)
            kept = (now - trial_cost) / max(promised, 1e-12)
            # longer steps only where the linear form kept its promise
            damping = max(damping * (0.2 if kept > 0.75 else 1.0 if kept > 0.25 else 3.0), 1e-9)
            x, now = trial, trial_cost
            log_pred, jacobian = log_jacobian(predict, np.exp(x), batched)
            residuals = log_observed - log_pred
            if small:
                converged = True
                break
        elif damping > 1e8:
            break
        else:
            damping *= 8.0
    weights = weigh(residuals)
    scale = 1.0
    if len(residuals):
        # median absolute residual of a unit normal is 0.6745
        scale = max(1.0, float(np.median(np.abs(residuals / sd))) / 0.6745)
    scaled = jacobian * (weights / (sd * scale) ** 2)[:, None]
    covariance: Array = np.asarray(np.linalg.inv(jacobian.T @ scaled + precision), np.float64)
    return FitResult(
        names=names,
        theta=np.exp(x),
        covariance=covariance,
        identifiability=np.sqrt(np.diag(covariance)) / prior_sd,
        residuals=residuals,
        weights=weights,
        noise_scale=scale,
        converged=converged,
    )


def _solve(matrix: Array, vector: Array) -> Array:
    """Solve a symmetric positive definite system; least squares where it is not quite."""
    # here, because prediction needs this module but never a fit, and the import is slow
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    try:
        solution: Array = cho_solve(cho_factor(matrix), vector)
        return solution
    except LinAlgError:
        return np.asarray(np.linalg.lstsq(matrix, vector, rcond=None)[0], dtype=np.float64)
