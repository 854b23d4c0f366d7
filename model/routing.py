"""How many distinct experts a layer's tokens touch.

Rows that share an expert read its weights once, so bytes follow the number of distinct experts.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def uniform_experts(tokens: ArrayLike, experts: int, per_token: int) -> Array:
    """Mean number of distinct experts of independent tokens under uniform routing (an upper bound).

    An expert is missed by one token with probability 1 - k/E (MoESD, Eq. 8).
    """
    _check(experts, per_token)
    return experts * -np.expm1(np.asarray(tokens, dtype=float) * _log_miss(experts, per_token))


def correlated_experts(
    tokens_per_request: ArrayLike,
    requests: ArrayLike,
    experts: int,
    per_token: int,
    exponent: ArrayLike,
) -> Array:
    """Distinct experts when a request's tokens route alike: E (1 - (1 - k/E)^(B n^g)).

    n tokens of one request count as n^g independent ones (g = ``exponent``, 1 is uniform);
    requests are independent. g = .74-.75 fits published counts of chains (8, 22, 36, 56 at 1, 4, 8,
    16 tokens), .54 a 127-token tree.
    """
    _check(experts, per_token)
    n = np.maximum(np.asarray(tokens_per_request, dtype=float), 1e-9)
    effective = np.asarray(requests, dtype=float) * n ** np.asarray(exponent, dtype=float)
    result: Array = experts * -np.expm1(effective * _log_miss(experts, per_token))
    return result


#: experts are grouped into this many classes of equal popularity
_CLASSES = 16


def expected_experts(
    tokens_per_request: ArrayLike,
    requests: ArrayLike,
    experts: int,
    per_token: int,
    exponent: ArrayLike,
    zipf: ArrayLike,
) -> Array:
    """Distinct experts of a step: correlated within a request, popular experts shared by all.

    A request's n tokens count as n^g independent ones (g = ``exponent``); an expert's popularity
    follows Zipf's law of exponent ``zipf`` (0: uniform, then ``correlated_experts``). Experts are
    taken in classes of equal popularity. All arguments broadcast.
    """
    _check(experts, per_token)
    n = np.maximum(np.asarray(tokens_per_request, dtype=float), 1e-9)
    effective = np.asarray(requests, dtype=float) * n ** np.asarray(exponent, dtype=float)
    classes = min(_CLASSES, experts)
    edges = np.linspace(0, experts, classes + 1)
    centre = 0.5 * (edges[1:] + edges[:-1]) + 0.5
    weight = centre ** -np.asarray(zipf, dtype=float)[..., None]
    mean = weight / weight.mean(axis=-1, keepdims=True)
    chance = np.minimum(per_token / experts * mean, 1.0 - 1e-9)
    missed = np.exp(effective[..., None] * np.log1p(-chance))
    result: Array = experts * (1.0 - missed.mean(axis=-1))
    return result


def skewed_experts(tokens: ArrayLike, probability_E: ArrayLike, per_token: int) -> Array:
    """Distinct experts of independent tokens when expert e is wanted with weight probability_E[e].

    Poisson-like inclusion: an expert's chance per token is min(1, lambda p_e), with lambda such
    that a token picks ``per_token`` experts in the mean.
    """
    include_E = inclusion_probabilities(probability_E, per_token)
    log_miss_E = np.log1p(-np.minimum(include_E, 1.0 - 1e-12))
    tokens_T = np.atleast_1d(np.asarray(tokens, dtype=float))
    hit = -np.expm1(tokens_T[:, None] * log_miss_E[None, :]).sum(axis=1)
    result: Array = hit.reshape(np.shape(tokens))
    return result


def inclusion_probabilities(probability_E: ArrayLike, per_token: int) -> Array:
    """Chance that one token picks each expert, scaled to ``per_token`` picks and capped at 1."""
    p = np.asarray(probability_E, dtype=float)
    _check(p.size, per_token)
    if np.any(p < 0) or p.sum() <= 0:
        raise ValueError("expert probabilities must be >= 0 and not all zero")
    include = np.zeros_like(p)
    capped = np.zeros(p.size, dtype=bool)
    for _ in range(p.size):
        free = per_token - capped.sum()
        weight = np.where(capped, 0.0, p)
        if weight.sum() <= 0:
            break
        include = np.where(capped, 1.0, weight / weight.sum() * free)
        over = include > 1.0
        if not over.any():
            break
        capped |= over
    result: Array = np.minimum(include, 1.0)
    return result


def zipf_probabilities(experts: int, exponent: float) -> Array:
    """Popularity of experts by Zipf's law, summing to 1; exponent 0 is uniform."""
    weight = np.arange(1, experts + 1, dtype=float) ** -exponent
    result: Array = weight / weight.sum()
    return result


def balanced_loads(tokens: int, experts: int, per_token: int) -> NDArray[np.int64]:
    """Tokens per expert when assignments are dealt out evenly (how 'balanced' benchmarks route)."""
    base, more = divmod(tokens * per_token, experts)
    return np.where(np.arange(experts) < more, base + 1, base)


def power_law_loads(tokens: int, experts: int, per_token: int, alpha: float) -> NDArray[np.int64]:
    """Tokens per expert of a 'power_law' benchmark row, taken at the quantiles of its law.

    The benchmark (aiconfigurator's collectors) draws each expert's weight from a power law of
    exponent ``alpha`` on [1, 0.8 T] (on [0.01, 2] while T k <= E), scales the weights to T k
    assignments, rounds, and repairs the sum at the least (or most) loaded experts. Random draws
    are replaced by mid-point quantiles.
    """
    total = tokens * per_token
    low, high = (1.0, tokens * 0.8) if total > experts else (0.01, 2.0)
    high = max(high, low * 1.000001)
    u = (np.arange(experts) + 0.5) / experts
    # at an exponent of 1 the law is the limit, which the formula does not reach
    power = 1.0 - alpha if abs(alpha - 1.0) > 1e-6 else 1e-6
    weight = ((high**power - low**power) * u + low**power) ** (1.0 / power)
    loads = np.rint(weight / weight.sum() * total).astype(np.int64)
    # no token picks an expert twice; what is cut or lost by rounding goes to the least loaded
    loads = np.minimum(loads, tokens)
    missing = total - int(loads.sum())
    for _ in range(missing):
        loads[np.argmin(loads)] += 1
    for _ in range(-missing):
        loads[np.argmax(loads)] -= 1
    result: NDArray[np.int64] = loads
    return result


def distinct_from_counts(distinct: Sequence[float], tokens: Sequence[int], at: ArrayLike) -> Array:
    """Measured distinct experts by token count, interpolated in log-log; ends keep their slope 0.

    Raises ``ValueError`` unless token counts rise.
    """
    if len(tokens) != len(distinct) or not tokens:
        raise ValueError(f"{len(tokens)} token counts for {len(distinct)} distinct-expert counts")
    if any(b <= a for a, b in pairwise(tokens)):
        raise ValueError(f"token counts {list(tokens)} must rise")
    result: Array = np.exp(
        np.interp(np.log(np.asarray(at, float)), np.log(tokens), np.log(distinct))
    )
    return result


def _log_miss(experts: int, per_token: int) -> float:
    return float(np.log1p(-min(per_token / experts, 1.0 - 1e-12)))


def _check(experts: int, per_token: int) -> None:
    if not 1 <= per_token <= experts:
        raise ValueError(f"experts per token {per_token} must be in 1..{experts} (experts)")
