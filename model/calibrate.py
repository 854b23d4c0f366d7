"""Update a calibration from measurements: one joint fit of every constant they tell about."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.calibration import LAUNCHED, LAUNCHED_SD, Calibration
from model.collectives import CollectiveTimes, Route
from model.constants import as_mapping, from_scale
from model.nccl.settings import NcclSettings
from model.observations import (
    AllreduceObservation,
    ExpertsObservation,
    Observation,
    TermObservation,
)
from model.robust import Fit, following_map
from model.routing import expected_experts
from model.step import SUB_TERMS, StepModel
from model.step_columns import StepRows

Array = NDArray[Any]

#: an all-reduce's formula is trusted to this, however often one collective is repeated; a term's
#: formula as far as the discrepancy of a cycle says
_REDUCE_FLOOR = 0.03
#: pseudo-observations behind the priors of the residual and of the slow mode's share
_PRIOR_WEIGHT = 4.0
#: knobs after which the residual may fall below its prior
_SEVERAL = 3
#: one wild row must not blow up every interval
_WORST_RESIDUAL = 0.5
_MODE_ROUNDS = 3
#: misfit (log of Student-t terms) that the slow mode must save to be believed
_SLOW_GAIN = 2.0
#: and that both modes must save over one for all rows
_SPLIT_GAIN = 6.0
#: a group is bound by launches when its slow mode is this many times its fast one
_LAUNCH_BOUND = 1.1
#: log ratio between launch-bound rows from which both modes are tried
_APART = 0.25


def calibrate(
    calibration: Calibration,
    observations: Sequence[Observation],
    step: StepModel | None,
    collectives: CollectiveTimes | None = None,
) -> Calibration:
    """The calibration after these observations (``AcceptanceCounts`` are for ``AcceptanceModel``).

    Repeats of one (knobs, workload, term) are one group: their spread counts, but n repeats of
    one knobs never make its formula exact. Launch-bound groups are read in the host mode, fast or
    slow, that fits them better. All-reduce rows alone need no ``step`` but ``collectives``.
    Raises ``ValueError`` for a term its knobs do not have, or when the step is missing.
    """
    terms = [o for o in observations if isinstance(o, TermObservation)]
    reduces = [o for o in observations if isinstance(o, AllreduceObservation)]
    experts = [o for o in observations if isinstance(o, ExpertsObservation)]
    if not terms and not reduces and not experts:
        return calibration
    if step is None and (terms or (reduces and collectives is None)):
        raise ValueError("terms need the step model, all-reduce rows the machine's collectives")
    data = _Data(step, collectives, calibration, terms, reduces, experts)
    told = _told(calibration, data)
    # the fast mode is the rule: a host that is slower throughout has costlier launches
    fit, modes = _fitted(calibration, data, told, np.zeros(data.values.size, dtype=bool))
    apart = data.split_modes(fit.x)
    if apart is not None:
        # launches that lie far apart may be of both modes, which no step from one mode finds
        other, other_modes = _fitted(calibration, data, told, apart)
        saved = data.misfit(fit.x, modes, calibration)
        saved -= data.misfit(other.x, other_modes, calibration)
        if saved > _SPLIT_GAIN:
            fit, modes = other, other_modes
    x = fit.x
    fixed = {
        "discrepancy": data.discrepancy(calibration["discrepancy"], x, modes),
        "host_slow_share": data.slow_share(calibration["host_slow_share"], x, modes),
    }
    residuals = data.term_residuals(calibration["discrepancy"], x, modes)
    residuals[LAUNCHED] = data.launched(x, modes)
    sources = [
        *(o.source for o in terms),
        *(o.source for o in reduces),
        *(o.source for o in experts),
    ]
    return _updated(calibration, fit, sources, fixed, residuals)


def _fitted(
    calibration: Calibration,
    data: "_Data",
    told: NDArray[np.intp],
    modes_N: NDArray[np.bool_],
) -> tuple[Fit, NDArray[np.bool_]]:
    """Fit of the told constants, and the modes that groups are in, starting from ``modes_N``."""
    x, modes = calibration.x.copy(), modes_N
    prior = calibration.covariance[np.ix_(told, told)]
    least, most = calibration.limits
    for _ in range(_MODE_ROUNDS):

        def predict(part_DK: Array, slow: NDArray[np.bool_] = modes) -> Array:
            whole = np.repeat(calibration.x[None], len(part_DK), axis=0)
            whole[:, told] = part_DK
            return data.predict(whole, slow)

        part = following_map(
            predict,
            data.values,
            data.rel_sds,
            calibration.x[told],
            prior,
            least_K=least[told],
            most_K=most[told],
        )
        x[told] = part.x
        previous, modes = modes, data.nearest_modes(x)
        if np.array_equal(previous, modes):
            break
    covariance = calibration.covariance.copy()
    covariance[np.ix_(told, told)] = part.covariance
    return Fit(x, covariance, part.residuals, part.cost), modes


def _told(calibration: Calibration, data: "_Data") -> NDArray[np.intp]:
    """Constants that some observation depends on, or that are tied to one by the covariance."""
    num = calibration.x.size
    probes = np.concatenate([np.zeros((1, num)), 0.3 * np.eye(num)])
    none = np.zeros(data.values.size, dtype=bool)
    told = np.zeros(num, dtype=bool)
    for modes in (none, ~none):
        moved = data.predict(calibration.x + probes, modes)
        told |= np.abs(np.log(moved[1:] / moved[0])).max(axis=1) > 1e-9
    told = told | (np.abs(calibration.covariance[told]) > 0).any(axis=0)
    index: NDArray[np.intp] = np.flatnonzero(told)
    return index


def _updated(
    calibration: Calibration,
    fit: Fit,
    sources: Sequence[str],
    fixed: Mapping[str, float],
    residuals: Mapping[str, float],
) -> Calibration:
    constants = tuple(
        replace(c, value=float(fixed.get(c.name, from_scale(fit.x[k], c.scale))))
        for k, c in enumerate(calibration.constants)
    )
    return replace(
        calibration,
        constants=constants,
        covariance=0.5 * (fit.covariance + fit.covariance.T),
        parent=calibration.id,
        term_residuals={**calibration.term_residuals, **residuals},
        used=(*calibration.used, *dict.fromkeys(s for s in sources if s)),
    )


class _Data:
    """Grouped observations and their predictions for many constant vectors."""

    def __init__(
        self,
        step: StepModel | None,
        collectives: CollectiveTimes | None,
        calibration: Calibration,
        terms: Sequence[TermObservation],
        reduces: Sequence[AllreduceObservation],
        experts: Sequence[ExpertsObservation],
    ) -> None:
        self._step, self._constants = step, calibration.constants
        self._collectives = collectives if step is None else step.collectives
        groups: dict[tuple[int, str], list[TermObservation]] = defaultdict(list)
        pairs: dict[tuple[object, object], int] = {}
        for o in terms:
            groups[(pairs.setdefault((o.knobs, o.workload), len(pairs)), o.term)].append(o)
        self._rows = StepRows.of([k for k, _ in pairs], [w for _, w in pairs]) if pairs else None  # type: ignore[misc]
        self._groups = [
            (row, term, _source_terms(term, rows[0].knobs.method != "off"))
            for (row, term), rows in groups.items()
        ]
        by_term: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for n, (row, _, names) in enumerate(self._groups):
            for name in names:
                by_term[name].append((n, row))
        #: term of the step model -> (groups that hold it, their rows)
        self._by_term = {
            name: (np.array([n for n, _ in pairs_]), np.array([row for _, row in pairs_]))
            for name, pairs_ in by_term.items()
        }
        self._reduces, self._experts = list(reduces), list(experts)
        floor = calibration.constant("discrepancy").prior
        value = [float(np.exp(np.median(np.log([o.value_ms for o in g])))) for g in groups.values()]
        sd = [
            float(np.hypot(np.mean([o.rel_sd for o in g]) / np.sqrt(len(g)), floor))
            for g in groups.values()
        ]
        value += [o.time_us for o in reduces]
        sd += [float(np.hypot(o.rel_sd, _REDUCE_FLOOR)) for o in reduces]
        value += [o.distinct for o in experts]
        sd += [float(np.hypot(o.rel_sd, _REDUCE_FLOOR)) for o in experts]
        self._modes: tuple[bytes, Array, Array] | None = None
        self.values = np.array(value)
        self.rel_sds = np.array(sd)

    def predict(self, x_DK: Array, slow_N: NDArray[np.bool_]) -> Array:
        """Predicted values [D, N]: ms for term groups, us for all-reduces, experts."""
        c = as_mapping(self._constants, x_DK)
        table = np.zeros((len(x_DK), len(self._groups)))
        if self._rows is not None:
            assert self._step is not None
            need_slow = slow_N[: len(self._groups)].any()
            all_slow = slow_N[: len(self._groups)].all()
            fast = self._step.terms_ms(self._rows, c, bool(all_slow))
            slow = fast if all_slow or not need_slow else self._step.terms_ms(self._rows, c, True)
            shape = (len(x_DK), self._rows.tp.size)
            for name, (columns, row) in self._by_term.items():
                picked = np.broadcast_to(fast[name], shape)[:, row]
                if need_slow:
                    late = np.broadcast_to(slow[name], shape)[:, row]
                    picked = np.where(slow_N[columns], late, picked)
                table[:, columns] += picked
        parts = [table]
        if self._reduces:
            parts.append(self._allreduce(c))
        parts += [
            np.broadcast_to(
                expected_experts(
                    o.tokens_per_request,
                    o.requests,
                    o.experts,
                    o.experts_per_token,
                    c["routing_exponent"],
                    c["routing_zipf"],
                ),
                (len(x_DK), 1),
            )
            for o in self._experts
        ]
        result: Array = np.maximum(np.concatenate(parts, axis=1), 1e-9)
        return result

    def _allreduce(self, c: Mapping[str, Array]) -> Array:
        routes = [
            Route(o.backend, o.num_ranks, NcclSettings.from_env(o.environment))
            for o in self._reduces
        ]
        sizes = [o.size_bytes for o in self._reduces]
        graphed = [o.graphed for o in self._reduces]
        assert self._collectives is not None
        return self._collectives.observed_us(routes, sizes, graphed, c)

    def modes(self, x: Array) -> tuple[Array, Array]:
        """Predictions in the host's fast and slow mode, [N] each; kept for the last ``x``."""
        key = x.tobytes()
        if self._modes is None or self._modes[0] != key:
            none = np.zeros(self.values.size, dtype=bool)
            fast, slow = self.predict(x[None], none)[0], self.predict(x[None], ~none)[0]
            self._modes = key, fast, slow
        return self._modes[1], self._modes[2]

    def nearest_modes(self, x: Array) -> NDArray[np.bool_]:
        """Which groups ran in the host's slow mode: all terms of one knobs are in the same."""
        fast, slow = (np.log(v) for v in self.modes(x))
        value = np.log(self.values)
        bound = np.abs(slow - fast) > 1e-9
        cost = np.stack([np.log1p(((value - m) / self.rel_sds) ** 2 / 4.0) for m in (fast, slow)])
        gain = np.where(bound, cost[0] - cost[1], 0.0)
        rows = np.array([row for row, _, _ in self._groups], dtype=np.intp)
        result = np.zeros(value.size, dtype=bool)
        if rows.size:
            by_row = np.bincount(rows, gain[: rows.size])
            # the fast mode is the rule: a slow reading must explain the terms clearly better
            result[: rows.size] = (by_row > _SLOW_GAIN)[rows] & bound[: rows.size]
        result[rows.size :] = gain[rows.size :] > _SLOW_GAIN
        return result

    def split_modes(self, x: Array) -> NDArray[np.bool_] | None:
        """Groups of the slower half of launch-bound rows, where these lie far apart; else None."""
        fast, slow = self.modes(x)
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        bound = np.zeros(self.values.size, dtype=bool)
        for n, (row, _, _) in enumerate(self._groups):
            bound[n] = slow[n] > fast[n] * _LAUNCH_BOUND
            if bound[n]:
                sums[row][0] += self.values[n]
                sums[row][1] += fast[n]
        off = {row: float(np.log(seen / model)) for row, (seen, model) in sums.items()}
        if not off or max(off.values()) - min(off.values()) < _APART:
            return None
        middle = 0.5 * (max(off.values()) + min(off.values()))
        late = {row for row, value in off.items() if value > middle}
        result = np.zeros(self.values.size, dtype=bool)
        for n, (row, _, _) in enumerate(self._groups):
            result[n] = bound[n] and row in late
        return result

    def misfit(self, x: Array, slow_N: NDArray[np.bool_], prior: Calibration) -> float:
        """Student-t misfit of the groups plus distance from the prior, to compare two fits."""
        residual = np.log(self.values / self.predict(x[None], slow_N)[0]) / self.rel_sds
        away = np.linalg.solve(np.linalg.cholesky(prior.covariance), x - prior.x)
        both = 2.5 * np.log1p(residual**2 / 4.0).sum() + 2.0 * np.log1p(away**2 / 4.0).sum()
        return float(both)

    def discrepancy(self, prior: float, x: Array, slow_N: NDArray[np.bool_]) -> float:
        """Relative residual of whole rows that launches do not bind, shrunk towards the prior."""
        found = self._residual(self._whole_rows(x, slow_N, bound=False), prior)
        # the constants have as many degrees of freedom as one or two knobs have terms: that those
        # are matched says nothing of the next ones
        several = len({row for row, _, _ in self._groups}) >= _SEVERAL
        return found if several else max(found, prior)

    def launched(self, x: Array, slow_N: NDArray[np.bool_]) -> float:
        """The same of rows that launches bind, about the host's mode they were read in."""
        return self._residual(self._whole_rows(x, slow_N, bound=True), LAUNCHED_SD)

    def _whole_rows(self, x: Array, slow_N: NDArray[np.bool_], *, bound: bool) -> list[float]:
        """Log of measured over predicted for rows (their terms added up, or their cycle)."""
        fast, slow = self.modes(x)
        predicted = np.where(slow_N, slow, fast)
        sums: dict[tuple[int, str], Array] = defaultdict(lambda: np.zeros(4))
        for n, (row, term, _) in enumerate(self._groups):
            if term not in ("verify", "decode"):
                key = (row, "cycle" if term == "cycle" else "terms")
                sums[key] += (self.values[n], predicted[n], fast[n], slow[n])
        return [
            float(np.log(seen / model))
            for seen, model, quick, late in sums.values()
            if (late > quick * _LAUNCH_BOUND) == bound
        ]

    @staticmethod
    def _residual(off: Sequence[float], prior: float) -> float:
        square = np.minimum(np.square(off), _WORST_RESIDUAL**2)
        total = _PRIOR_WEIGHT * prior**2 + float(np.sum(square))
        return float(np.sqrt(total / (_PRIOR_WEIGHT + len(off))))

    def term_residuals(self, prior: float, x: Array, slow_N: NDArray[np.bool_]) -> dict[str, float]:
        """Relative residual of each term that was measured by itself, shrunk towards the prior.

        A term whose formula lacks something (a kernel's other path, say) is off by itself, and its
        prediction has to say so, however well the sum of all terms fits.
        """
        fast, slow = self.modes(x)
        predicted = np.where(slow_N, slow, fast)
        squares: dict[str, list[float]] = defaultdict(list)
        for n, (_, _, names) in enumerate(self._groups):
            if len(names) == 1:
                off = float(np.log(self.values[n] / predicted[n]))
                squares[names[0]].append(min(off * off, _WORST_RESIDUAL**2))
        return {
            name: float(np.sqrt((_PRIOR_WEIGHT * prior**2 + sum(off)) / (_PRIOR_WEIGHT + len(off))))
            for name, off in squares.items()
        }

    def slow_share(self, prior: float, x: Array, slow_N: NDArray[np.bool_]) -> float:
        """Share of launch-bound rows seen in the slow mode, shrunk towards the prior."""
        fast, slow = self.modes(x)
        rows = {
            row: bool(slow_N[n])
            for n, (row, _, _) in enumerate(self._groups)
            if np.log(slow[n] / fast[n]) > 0.1
        }
        seen = sum(rows.values())
        share = (_PRIOR_WEIGHT * prior + seen) / (_PRIOR_WEIGHT + len(rows))
        return float(np.clip(share, 0.02, 0.98))


def _source_terms(term: str, speculative: bool) -> tuple[str, ...]:
    """Names in ``StepModel.terms_ms`` that add up to an observed term."""
    head, _, sub = term.partition(".")
    whole = tuple(f"target.{name}" for name in SUB_TERMS)
    wrong = "decode" if speculative else "verify"
    if head == wrong or (not speculative and head in ("draft", "extend")):
        method = "eagle3" if speculative else "off"
        raise ValueError(f"term {term!r} does not exist with speculation.method {method}")
    if term == "cycle":
        return (*whole, "sample", "host_gap", *(("draft", "extend") if speculative else ()))
    if term in ("verify", "decode"):
        return whole
    return (f"target.{sub}",) if sub else (term,)
