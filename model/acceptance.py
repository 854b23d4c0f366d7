"""Acceptance of drafts: a rate for each depth and rank, learnt from counts, with its uncertainty.

Rates follow four shape parameters and one deviation per depth:
top-1 rate at depth d (from 1): a_d = a_1 * r^(d-1), moved by a logit deviation of its own;
the rest, (1 - a_d) * m, is shared over the lower ranks by a Zipf law of exponent s.
Measured depths pin their deviation; an unmeasured depth or width keeps the prior's spread, so its
interval is honestly wide. Published chains of 3 extrapolated this way gave the accept length of
chains of 7 within -2.5..+3.7 % (speculation notes; Maverick, Qwen3-8B).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.observations import AcceptanceCounts, AcceptLength
from model.spec import Interval, Knobs
from model.tree import (
    best_tree_accept_lengths,
    dynamic_accept_lengths,
    dynamic_accepted_tables,
)

Array = NDArray[Any]

MAX_DEPTHS = 16
MAX_RANKS = 16
_NUM_SHAPE = 4
_NUM_PARAMS = _NUM_SHAPE + MAX_DEPTHS
#: logit a_1, log r, logit m, log s. a_1 0.45-0.85 for EAGLE-3 heads; r .94-.97, m .7-.9,
#: s 1.45-1.7 fitted to two published SGLang grids of Qwen3-30B-A3B
_PRIOR_MEAN = (0.6, -0.06, 1.4, 0.45)
_PRIOR_SD = (0.8, 0.08, 0.5, 0.2)
#: logit deviation of one depth from the geometric law
_DEPTH_SD = 0.12
#: relative error of drafts accepted per verify in trees: two published grids, leave-one-out
_TREE_SD = 0.05
#: error of the share that a rank takes of a depth, from guessing which nodes were kept
_SHARE_SD = 0.03
_NUM_SAMPLES = 128
#: sd by which the rates of one prompt lie off those of all prompts: logit a_1, and by depth
_PROMPT_SD, _PROMPT_DEPTH_SD = 0.45, 0.25


@dataclass(frozen=True, eq=False, kw_only=True)
class AcceptanceModel:
    """Posterior over acceptance rates of one draft on one workload (normal in theta)."""

    theta: Array
    covariance: Array
    #: verifies behind the posterior; 0 is the prior alone
    num_verifies: int
    #: deepest depth and widest rank that counts told about
    measured_depth: int
    measured_width: int
    #: by concurrency whose counts were given: each level decodes prompts of its own
    by_load: Mapping[int, "AcceptanceModel"] = field(default_factory=dict)

    @classmethod
    def prior(
        cls, first_rate: float | None = None, ratio: float | None = None
    ) -> "AcceptanceModel":
        """Before any count. A published first rate (and ratio per depth) may be given.

        Raises ``ValueError`` for a rate outside (0, 1).
        """
        theta = np.concatenate([_PRIOR_MEAN, np.zeros(MAX_DEPTHS)])
        sd = np.concatenate([_PRIOR_SD, np.full(MAX_DEPTHS, _DEPTH_SD)])
        if first_rate is not None:
            if not 0.0 < first_rate < 1.0:
                raise ValueError(f"first_rate {first_rate} must be between 0 and 1")
            theta[0], sd[0] = _logit(first_rate), 0.25
        if ratio is not None:
            if not 0.0 < ratio <= 1.2:
                raise ValueError(f"ratio {ratio} must be in (0, 1.2]")
            theta[1], sd[1] = np.log(ratio), 0.04
        return cls(
            theta=theta,
            covariance=np.diag(sd**2),
            num_verifies=0,
            measured_depth=0,
            measured_width=0,
        )

    @property
    def id(self) -> str:
        """12 hex digits of the posterior."""
        blob = np.round(self.theta, 9).tobytes() + np.round(self.covariance, 9).tobytes()
        blob += "".join(
            f"{load} {model.id}" for load, model in sorted(self.by_load.items())
        ).encode()
        return hashlib.sha256(blob).hexdigest()[:12]

    def update(self, seen: Sequence[AcceptanceCounts | AcceptLength]) -> "AcceptanceModel":
        """Posterior after more counts or accept lengths.

        Counts that name their load also make a posterior of that load's own prompts: what other
        loads told is a prior there, as wide as prompts differ.
        """
        loads = {c.concurrency for c in seen if isinstance(c, AcceptanceCounts)} - {None}
        by_load = dict(self.by_load)
        for load in sorted(load for load in loads if load is not None):
            own = [c for c in seen if isinstance(c, AcceptanceCounts) and c.concurrency == load]
            others = [c for c in seen if c not in own]
            base = self.by_load.get(load) or self._of_prompts(load, others)
            by_load[load] = base.update_all(own)
        return replace(self.update_all(seen), by_load=by_load)

    def at(self, concurrency: int) -> "AcceptanceModel":
        """The posterior for the prompts of this load: its own counts', or that of all."""
        return self.by_load.get(concurrency, self)

    def _of_prompts(
        self, load: int, others: Sequence[AcceptanceCounts | AcceptLength]
    ) -> "AcceptanceModel":
        """This posterior and the counts of other loads, as a prior for ``load`` prompts."""
        base = self.update_all(others)
        off = np.zeros(_NUM_PARAMS)
        off[0] = _PROMPT_SD**2 / load
        off[_NUM_SHAPE:] = _PROMPT_DEPTH_SD**2 / load
        return replace(base, covariance=base.covariance + np.diag(off), by_load={})

    def update_all(self, seen: Sequence[AcceptanceCounts | AcceptLength]) -> "AcceptanceModel":
        """One posterior of all that was seen (Laplace approximation, Gauss-Newton).

        A chain's depth d is binomial among the verifies that reached depth d - 1; a tree's ranks
        share them as its model tree predicts, so ranks the budget left out do not count as misses.
        """
        counts = [c for c in seen if isinstance(c, AcceptanceCounts) and c.num_verifies > 0]
        lengths = [c for c in seen if isinstance(c, AcceptLength)]
        useful: list[AcceptanceCounts | AcceptLength] = [*counts, *lengths]
        if not useful:
            return self
        prior_precision = np.linalg.inv(self.covariance)
        theta = self.theta.copy()
        precision = prior_precision
        for _ in range(12):
            residual, jacobian = _linearise(theta, useful)
            precision = prior_precision + jacobian.T @ jacobian
            gradient = jacobian.T @ residual + prior_precision @ (self.theta - theta)
            step = np.linalg.solve(precision, gradient)
            theta = theta + np.clip(step, -1.0, 1.0)
            if np.abs(step).max() < 1e-5:
                break
        return AcceptanceModel(
            theta=theta,
            covariance=np.linalg.inv(precision),
            num_verifies=self.num_verifies + sum(c.num_verifies for c in counts),
            measured_depth=max(self.measured_depth, *(c.steps for c in useful)),
            measured_width=max(self.measured_width, *(c.topk for c in useful)),
        )

    def rates(self) -> Array:
        """Posterior median rates [MAX_DEPTHS, MAX_RANKS]."""
        result: Array = rates_of(self.theta[None])[0]
        return result

    @cached_property
    def samples(self) -> Array:
        """Rate tables drawn from the posterior, [S, MAX_DEPTHS, MAX_RANKS]; always the same."""
        normal_SP = np.random.default_rng(20250101).standard_normal(
            (_NUM_SAMPLES // 2, _NUM_PARAMS)
        )
        normal_SP = np.concatenate([normal_SP, -normal_SP])
        root = np.linalg.cholesky(self.covariance + 1e-12 * np.eye(_NUM_PARAMS))
        return rates_of(self.theta + normal_SP @ root.T)

    def accept_length_samples(self, steps: int, topk: int, draft_tokens: int) -> Array:
        """Accept lengths (bonus included) under the posterior, [S].

        Raises ``ValueError`` for trees deeper or wider than the model holds.
        """
        if steps > MAX_DEPTHS or topk > MAX_RANKS:
            raise ValueError(
                f"steps {steps}, topk {topk}: at most {MAX_DEPTHS} steps and topk {MAX_RANKS}"
            )
        return self._by_nodes(steps, topk)[:, draft_tokens - 1]

    def accept_length(self, knobs: Knobs) -> Interval:
        """Median and 90 % interval of the accept length of these knobs."""
        if knobs.method == "off":
            return Interval(1.0, 1.0, 1.0)
        tau_S = self.accept_length_samples(knobs.steps, knobs.topk, knobs.draft_tokens)
        low, median, high = np.quantile(tau_S, [0.05, 0.5, 0.95])
        return Interval(float(median), float(low), float(high))

    def best_tree(self, draft_tokens: int, steps: int = MAX_DEPTHS) -> float:
        """The most any tree of ``draft_tokens`` nodes (root included) and this depth can emit.

        A bound for every topk: Sequoia's dynamic programme over the median rates.
        """
        if not 1 <= steps <= MAX_DEPTHS:
            raise ValueError(f"steps {steps} must be in 1..{MAX_DEPTHS}")
        return float(best_tree_accept_lengths(self.rates()[:steps], draft_tokens)[draft_tokens])

    @cached_property
    def _table(self) -> dict[tuple[int, int], Array]:
        return {}

    def _by_nodes(self, steps: int, topk: int) -> Array:
        key = (steps, topk)
        if key not in self._table:
            table = dynamic_accept_lengths(self.samples, steps, topk)
            if topk > 1:
                # the draft's scores are not the acceptance rates: a tree keeps other nodes
                error = np.random.default_rng(steps * 64 + topk).standard_normal(len(table))
                table = 1.0 + (table - 1.0) * np.exp(_TREE_SD * error)[:, None]
            self._table[key] = table
        return self._table[key]


def rates_of(theta_SP: Array) -> Array:
    """Rate tables [S, MAX_DEPTHS, MAX_RANKS] of parameter vectors [S, P]."""
    depth_D = np.arange(MAX_DEPTHS)
    first = _sigmoid(theta_SP[:, 0, None]) * np.exp(theta_SP[:, 1, None] * depth_D)
    top_SD = _sigmoid(_logit(np.clip(first, 1e-6, 1 - 1e-6)) + theta_SP[:, _NUM_SHAPE:])
    zipf = np.arange(1, MAX_RANKS)[None, :] ** -np.exp(theta_SP[:, 3, None])
    share_SR = _sigmoid(theta_SP[:, 2, None]) * zipf / zipf.sum(axis=1, keepdims=True)
    rest = (1.0 - top_SD)[:, :, None] * share_SR[:, None, :]
    # the draft ranks by its own belief: a lower rank that beat a higher one would be reordered
    return np.concatenate([top_SD[:, :, None], np.minimum(rest, top_SD[:, :, None])], axis=2)


def _linearise(
    theta: Array, seen: Sequence[AcceptanceCounts | AcceptLength]
) -> tuple[Array, Array]:
    """Standardised residuals and their Jacobian by theta."""
    delta = 1e-4
    thetas = theta + delta * np.concatenate([np.zeros((1, _NUM_PARAMS)), np.eye(_NUM_PARAMS)])
    tables = rates_of(thetas)
    residuals, rows = [], []
    for one in seen:
        if isinstance(one, AcceptLength):
            lengths = dynamic_accept_lengths(tables, one.steps, one.topk)
            model = np.log(lengths[:, one.draft_tokens - 1])[:, None]
            sd, wanted = np.array([one.rel_sd]), np.array([np.log(one.accept_length)])
        else:
            wanted, weight, shares_of = _targets(one)
            model = shares_of(tables)
            # which nodes a tree kept is the model's guess: its shares are not exact
            guess = _SHARE_SD if one.topk > 1 else 0.0
            sd = np.sqrt(np.clip(model[0] * (1 - model[0]), 1e-3, None) / weight + guess**2)
        residuals.append((wanted - model[0]) / sd)
        rows.append(((model[1:] - model[0]) / delta / sd).T)
    return np.concatenate(residuals), np.concatenate(rows)


def _targets(count: AcceptanceCounts) -> tuple[Array, Array, Callable[[Array], Array]]:
    """(observed shares, trials of each, function of rate tables [S, ..] giving the shares)."""
    depths = min(count.steps, MAX_DEPTHS)
    # counts end at the deepest depth that some path reached: deeper ones are zero, not unknown
    counts = (*count.accepted_by_depth, *(0,) * depths)[:depths]
    reached = np.array((count.num_verifies, *counts), dtype=float)
    depths = int(np.count_nonzero(reached[:depths] > 0))
    base = reached[:depths]
    if count.topk == 1 or not _has_ranks(count, reached[1 : depths + 1]):
        seen = reached[1 : depths + 1] / base
        if count.topk == 1:
            return seen, base, lambda tables: tables[:, :depths, 0]
        return seen, base, lambda tables: _conditional(tables, count, depths).sum(axis=2)
    ranks = min(count.topk, MAX_RANKS)
    table_DR = np.zeros((depths, ranks))
    for depth, row in enumerate(count.accepted_by_depth_rank[:depths]):
        table_DR[depth, : min(len(row), ranks)] = row[:ranks]
    weight = np.repeat(base, ranks)
    return (
        (table_DR / base[:, None]).ravel(),
        weight,
        lambda tables: _conditional(tables, count, depths)[:, :, :ranks].reshape(len(tables), -1),
    )


def _has_ranks(count: AcceptanceCounts, reached_D: Array) -> bool:
    """Whether ranks are given at every depth that some path reached."""
    given = len(count.accepted_by_depth_rank)
    return bool(count.accepted_by_depth_rank) and not reached_D[given:].any()


def _conditional(tables: Array, count: AcceptanceCounts, depths: int) -> Array:
    """P(accepted at depth d by rank r | depth d - 1 reached) in each table's dynamic tree."""
    joint = dynamic_accepted_tables(
        tables, count.steps, count.topk, count.draft_tokens, depths, MAX_RANKS
    )
    reached = joint.sum(axis=2)
    before = np.concatenate([np.ones((len(tables), 1)), reached[:, :-1]], axis=1)
    result: Array = joint / np.maximum(before, 1e-9)[:, :, None]
    return result


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _logit(p: Array | float) -> Array:
    p = np.asarray(p, dtype=float)
    return np.log(p / (1.0 - p))
