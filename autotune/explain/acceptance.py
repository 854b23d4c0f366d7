"""Acceptance by depth: what was counted, what the model assumed before, what it holds now."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.acceptance import AcceptanceModel
from model.spec import Interval, Knobs
from model.tree import dynamic_tree

Array = NDArray[Any]

#: 95 % normal quantile, two-sided
_Z95 = 1.96
#: posterior draws for trees, each of which has to be built
_TREE_DRAWS = 32
#: a conditional rate below this after the first depth is a wiring fault, not a weak draft
_DEAD_RATE = 0.05
_MIN_REACHED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthRow:
    """One depth: share of the verifies that reached it and accepted one more draft."""

    depth: int
    reached: float
    accepted: float
    measured: Interval | None
    #: before any count
    assumed: Interval
    #: with the counts of the study
    learnt: Interval
    #: the measured interval leaves the assumed one
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceReport:
    """Acceptance of one tree."""

    rows: tuple[DepthRow, ...]
    num_verifies: float
    #: what stands out, one sentence each
    findings: tuple[str, ...]


def acceptance_report(
    knobs: Knobs,
    accepted_by_depth: Sequence[float],
    num_verifies: float,
    prior: AcceptanceModel,
    posterior: AcceptanceModel,
) -> AcceptanceReport:
    """Rates by depth of a tree; counts may be missing (0 verifies: assumptions only)."""
    assumed, learnt = (_model_rates(model, knobs) for model in (prior, posterior))
    rows = []
    reached = float(num_verifies)
    for depth in range(1, knobs.steps + 1):
        known = depth <= len(accepted_by_depth) and reached > 0
        accepted = float(accepted_by_depth[depth - 1]) if known else 0.0
        measured = _wilson(accepted, reached) if known else None
        before = assumed[depth - 1]
        rows.append(
            DepthRow(
                depth=depth,
                reached=reached,
                accepted=accepted,
                measured=measured,
                assumed=before,
                learnt=learnt[depth - 1],
                differs=measured is not None
                and (measured.low > before.high or measured.high < before.low),
            )
        )
        reached = accepted
    return AcceptanceReport(
        rows=tuple(rows), num_verifies=num_verifies, findings=tuple(_findings(knobs, rows))
    )


def _findings(knobs: Knobs, rows: Sequence[DepthRow]) -> list[str]:
    found = []
    first = rows[0]
    if first.measured is not None and first.reached >= _MIN_REACHED:
        if first.measured.high < _DEAD_RATE:
            found.append(
                f"almost no draft is accepted ({first.accepted:.0f} of {first.reached:.0f} at "
                f"depth 1): wrong or unsupported draft head; no tree can help"
            )
        for row in rows[1:]:
            if row.measured is None or row.reached < _MIN_REACHED:
                break
            if row.measured.high < _DEAD_RATE and first.measured.low > 4 * _DEAD_RATE:
                found.append(
                    f"acceptance falls to {row.accepted / row.reached:.3f} at depth {row.depth} "
                    f"after {first.measured.median:.2f} at depth 1: a wiring fault (hidden state "
                    f"or position of later draft steps), not a weak draft"
                )
                break
    for row in rows:
        if row.differs and row.measured is not None:
            side = "above" if row.measured.median > row.assumed.median else "below"
            found.append(
                f"depth {row.depth}: measured {row.measured.median:.2f} is {side} what the model "
                f"assumed ({row.assumed.low:.2f}–{row.assumed.high:.2f})"
            )
    last = rows[-1]
    if last.measured is not None and last.reached >= _MIN_REACHED and knobs.steps > 1:
        share = last.accepted / max(rows[0].reached, 1.0)
        if share < 0.05:
            found.append(
                f"only {100 * share:.1f} % of the verifies use depth {last.depth}: its draft step "
                f"and its rows in the verify are nearly always wasted"
            )
    return found


def _model_rates(model: AcceptanceModel, knobs: Knobs) -> list[Interval]:
    """Chance to accept one more at each depth, given that it is reached, with a 90 % interval."""
    if knobs.topk == 1:
        rates_SD = model.samples[:, : knobs.steps, 0]
    else:
        rates_SD = np.stack([_tree_rates(table, knobs) for table in model.samples[:_TREE_DRAWS]])
    low, median, high = np.quantile(rates_SD, [0.05, 0.5, 0.95], axis=0)
    return [
        Interval(float(m), float(lo), float(h)) for m, lo, h in zip(median, low, high, strict=True)
    ]


def _tree_rates(rate_DR: Array, knobs: Knobs) -> Array:
    tree = dynamic_tree(rate_DR, knobs.steps, knobs.topk)
    joint = tree.accepted_table(knobs.draft_tokens, knobs.steps, rate_DR.shape[1]).sum(axis=1)
    before = np.concatenate([[1.0], joint[:-1]])
    result: Array = joint / np.maximum(before, 1e-9)
    return result


def _wilson(successes: float, trials: float) -> Interval:
    """Wilson's 95 % interval of a share."""
    rate = min(successes / trials, 1.0)
    scale = 1.0 + _Z95**2 / trials
    centre = (rate + _Z95**2 / (2 * trials)) / scale
    half = _Z95 * math.sqrt(rate * (1 - rate) / trials + _Z95**2 / (4 * trials**2)) / scale
    return Interval(rate, max(0.0, centre - half), min(1.0, centre + half))
