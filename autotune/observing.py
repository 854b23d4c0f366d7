"""What finished trials tell the performance model: each trial is read and condensed once.

A study of hundreds of trials refits its model many times; what is handed to the fit grows with the
distinct configurations, trees and loads, not with the trials.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autotune.records import Measurement
from autotune.store.views import TrialView
from model.observations import AcceptanceCounts, ExpertsObservation, TermObservation
from model.shapes import ModelShape
from model.spec import Knobs, Workload

if TYPE_CHECKING:
    from autotune.store.store import Store

#: what a single repeat's term is believed to, at best
_MIN_REL_SD = 0.02
#: the experts of one cycle speak for all cycles within this
_EXPERTS_REL_SD = 0.1


@dataclass(frozen=True, slots=True)
class _Experts:
    """Distinct experts of a layer that the repeats of one trial counted at one load."""

    tokens: int
    level: int
    counted: tuple[float, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """One trial, condensed."""

    terms: tuple[TermObservation, ...] = ()
    experts: tuple[_Experts, ...] = ()
    counts: tuple[AcceptanceCounts, ...] = ()
    #: GiB of the fullest GPU at the highest load, where it was read
    memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What some trials told together."""

    observations: tuple[TermObservation | ExpertsObservation, ...]
    counts: tuple[AcceptanceCounts, ...]
    #: knobs and GiB of the fullest GPU at the highest load, a pair a trial that read it
    memory_gib: tuple[tuple[Knobs, float], ...]


class Observer:
    """Reads trials of one study; what a finished trial told is kept."""

    def __init__(self, target: ModelShape, workloads: Mapping[int, Workload]) -> None:
        self._target, self._workloads = target, workloads
        self._told: dict[int, _Told] = {}

    def observed(self, store: "Store", trials: Sequence[TrialView]) -> Observed:
        """Everything that these finished trials told."""
        fresh = [trial for trial in trials if trial.id not in self._told]
        if fresh:
            self._read(store, fresh)
        told = [self._told[trial.id] for trial in trials]
        experts = self._joined_experts(item for one in told for item in one.experts)
        return Observed(
            observations=(*(term for one in told for term in one.terms), *experts),
            counts=_joined_counts(count for one in told for count in one.counts),
            memory_gib=tuple(
                (trial.knobs, one.memory_gib)
                for trial, one in zip(trials, told, strict=True)
                if one.memory_gib is not None
            ),
        )

    def _read(self, store: "Store", trials: Sequence[TrialView]) -> None:
        by_number = {trial.number: trial for trial in trials}
        repeats: dict[int, dict[int, list[Measurement]]] = {t.number: {} for t in trials}
        for record in store.measurements(sorted(trial.id for trial in trials)):
            if record.trial in by_number and record.repeat >= 0 and record.failure is None:
                repeats[record.trial].setdefault(record.concurrency, []).append(record)
        for number, levels in repeats.items():
            trial = by_number[number]
            self._told[trial.id] = self._condensed(trial.knobs, levels)

    def _condensed(self, knobs: Knobs, levels: Mapping[int, Sequence[Measurement]]) -> _Told:
        highest = levels.get(max(self._workloads), ())
        memory = [r.memory_gib for r in highest if r.memory_gib is not None]
        return _Told(
            terms=tuple(
                term
                for level, repeats in levels.items()
                for term in _term_observations(knobs, self._workloads[level], repeats)
            ),
            experts=tuple(
                found
                for level, repeats in levels.items()
                for found in _experts(self._target, knobs, level, repeats)
            ),
            counts=tuple(
                count
                for level, repeats in levels.items()
                for count in _acceptance_counts(knobs, level, repeats)
            ),
            memory_gib=max(memory) if memory else None,
        )

    def _joined_experts(self, found: Iterable[_Experts]) -> list[ExpertsObservation]:
        """One observation of each number of tokens and load: the formula knows no other knob."""
        groups: dict[tuple[int, int], list[_Experts]] = {}
        for one in found:
            groups.setdefault((one.tokens, one.level), []).append(one)
        joined = []
        for (tokens, level), members in groups.items():
            counted = [count for one in members for count in one.counted]
            joined.append(
                ExpertsObservation(
                    tokens_per_request=tokens,
                    requests=level,
                    experts=self._target.experts,
                    experts_per_token=self._target.experts_per_token,
                    distinct=float(np.mean(counted)),
                    rel_sd=_EXPERTS_REL_SD / math.sqrt(len(counted)),
                    source=members[0].source,
                )
            )
        return joined


def _experts(
    target: ModelShape, knobs: Knobs, level: int, repeats: Sequence[Measurement]
) -> list[_Experts]:
    """Distinct experts of a layer, from the repeats that counted them."""
    counted = [r.distinct_experts for r in repeats if r.distinct_experts is not None]
    if not counted or target.experts_per_token < 1:
        return []
    tokens = 1 if knobs.method == "off" else knobs.draft_tokens
    most = min(target.experts, tokens * level * target.experts_per_token)
    # a batch padded to a captured size reads experts for its padding too: not this load's count
    if not target.experts_per_token <= float(np.mean(counted)) <= most:
        return []
    source = f"trial {repeats[0].trial}, concurrency {level}"
    return [_Experts(tokens, level, tuple(counted), source)]


def _term_observations(
    knobs: Knobs, workload: Workload, repeats: Sequence[Measurement]
) -> list[TermObservation]:
    """Median of each term over the repeats, with its standard error."""
    found: list[TermObservation] = []
    names = {name for repeat in repeats for name, value in repeat.terms_ms.items() if value > 0}
    series = {
        name: [r.terms_ms[name] for r in repeats if name in r.terms_ms] for name in sorted(names)
    }
    if not series:
        series = {"cycle": [r.cycle_ms for r in repeats if r.cycle_ms]}
    for term, values in series.items():
        if not values or np.median(values) <= 0:
            continue
        centre = float(np.median(values))
        error = float(np.std(values)) / centre / math.sqrt(len(values))
        source = f"trial {repeats[0].trial}, concurrency {workload.concurrency}"
        found.append(
            TermObservation(
                knobs=knobs,
                workload=workload,
                term=term,
                value_ms=centre,
                rel_sd=max(error, _MIN_REL_SD),
                source=source,
            )
        )
    return found


def _acceptance_counts(
    knobs: Knobs, level: int, repeats: Sequence[Measurement]
) -> list[AcceptanceCounts]:
    """Counts of one repeat: greedy repeats of the same prompts accept the same tokens."""
    if knobs.method == "off":
        return []
    for repeat in repeats:
        counts = repeat.acceptance
        if counts is not None and counts.num_verifies > 0:
            return [
                AcceptanceCounts(
                    steps=knobs.steps,
                    topk=knobs.topk,
                    draft_tokens=knobs.draft_tokens,
                    num_verifies=counts.num_verifies,
                    accepted_by_depth=counts.accepted_by_depth,
                    accepted_by_depth_rank=counts.accepted_by_depth_rank,
                    concurrency=level,
                )
            ]
    return []


def _joined_counts(found: Iterable[AcceptanceCounts]) -> tuple[AcceptanceCounts, ...]:
    """Counts of one tree at one load added up, those with and without ranks apart."""
    joined: dict[tuple[int, int, int, int | None, bool], AcceptanceCounts] = {}
    for one in found:
        rows = one.accepted_by_depth_rank
        ranked = bool(rows) and not any(one.accepted_by_depth[len(rows) :])
        key = (one.steps, one.topk, one.draft_tokens, one.concurrency, ranked)
        other = joined.get(key)
        joined[key] = one if other is None else _sum(other, one)
    return tuple(joined.values())


def _sum(a: AcceptanceCounts, b: AcceptanceCounts) -> AcceptanceCounts:
    rows_a, rows_b = a.accepted_by_depth_rank, b.accepted_by_depth_rank
    depths = max(len(rows_a), len(rows_b))
    return replace(
        a,
        num_verifies=a.num_verifies + b.num_verifies,
        accepted_by_depth=_added(a.accepted_by_depth, b.accepted_by_depth),
        accepted_by_depth_rank=tuple(
            _added(
                rows_a[depth] if depth < len(rows_a) else (),
                rows_b[depth] if depth < len(rows_b) else (),
            )
            for depth in range(depths)
        ),
    )


def _added(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """Element by element; a shorter one counts as zero beyond its end."""
    size = max(len(a), len(b))
    return tuple((a[i] if i < len(a) else 0) + (b[i] if i < len(b) else 0) for i in range(size))
