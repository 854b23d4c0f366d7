"""Predict every knobs of a space: time of each term, accept length, tokens per second.

All uncertainty travels to the result: the constants' covariance by linearisation, the acceptance
posterior by its samples, the host's two launch modes as a mixture, and a residual for what the
formulas leave out. Knobs that share a tree, effective collective and graphs share their step, so
the step model runs once per distinct step and a large space is a gather.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import breakeven
from model.acceptance import AcceptanceModel
from model.calibrate import calibrate
from model.calibration import Calibration
from model.collectives import CollectiveTimes
from model.constants import as_mapping
from model.intervals import mixture_quantiles
from model.knobs_array import OFF, KnobsArray
from model.machine import Machine
from model.memory import USABLE, memory_use
from model.observations import AcceptanceCounts, Observation
from model.shapes import DraftShape, ModelShape
from model.spec import CYCLE_TERMS, DECODE_TERMS, Inert, Interval, Knobs, Prediction, Workload
from model.step import SUB_TERMS, StepModel, StepRows

Array = NDArray[Any]
_DELTA = 1e-3


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictionArray:
    """Predictions of N knobs: [3, N] arrays hold the 5 %, 50 % and 95 % quantiles."""

    knobs: KnobsArray
    tokens_per_s_quantiles: Array
    cycle_ms_quantiles: Array
    accept_length_quantiles: Array
    memory_gib: Array
    feasible: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.knobs)

    @property
    def tokens_per_s(self) -> Array:
        """Median tokens/s of all requests together, [N]; 0 where it does not fit."""
        return np.where(self.feasible, self.tokens_per_s_quantiles[1], 0.0)

    def best(self, count: int) -> NDArray[np.intp]:
        """Indices of the ``count`` highest medians, best first."""
        order: NDArray[np.intp] = np.argsort(-self.tokens_per_s, kind="stable")[:count]
        return order


@dataclass(frozen=True, eq=False)
class Predictor:
    """The performance model of one target, draft, machine, calibration and acceptance."""

    target: ModelShape
    draft: DraftShape | None
    machine: Machine
    calibration: Calibration
    acceptance: AcceptanceModel

    def __post_init__(self) -> None:
        collectives = CollectiveTimes(self.machine)
        object.__setattr__(
            self, "_step", StepModel(self.target, self.draft, self.machine, collectives)
        )

    @property
    def step(self) -> StepModel:
        """The step model behind the predictions."""
        return self._step  # type: ignore[attr-defined, no-any-return]

    def predict(self, knobs: Knobs, workload: Workload) -> Prediction:
        """Everything about one knobs. Raises ``ValueError`` if speculation has no draft shape."""
        self._check(knobs.method != "off")
        rows = StepRows.of([knobs], [workload])
        fast, slow = self._terms(rows, slow=False), self._terms(rows, slow=True)
        prefix = "verify" if knobs.method != "off" else "decode"
        names = CYCLE_TERMS if knobs.method != "off" else DECODE_TERMS
        terms = {
            name: _interval(self._quantiles(fast[_source(name)], slow[_source(name)])[:, 0])
            for name in names
        }
        cycle = self._quantiles(_total(fast), _total(slow))[:, 0]
        tau_S = self._tau_samples(knobs)
        speed = self._speed_quantiles(_total(fast), _total(slow), tau_S[None], workload)
        memory, reason = self._memory(rows, workload)
        return Prediction(
            knobs=knobs,
            workload=workload,
            calibration_id=self.calibration.id,
            terms_ms=terms,
            cycle_ms=_interval(cycle),
            accept_length=_interval(np.quantile(tau_S, [0.05, 0.5, 0.95])),
            tokens_per_s=_interval(speed[:, 0]),
            speed_of_light_ms=breakeven.speed_of_light_ms(self.step, knobs, workload, prefix),
            memory_gib_per_gpu=float(memory[0]),
            feasible=reason[0] is None,
            infeasible_reason=reason[0],
            inert=self.inert(knobs),
        )

    def predict_many(
        self, knobs: Sequence[Knobs] | KnobsArray, workload: Workload
    ) -> PredictionArray:
        """Medians and 90 % intervals of many knobs at once."""
        array = knobs if isinstance(knobs, KnobsArray) else KnobsArray.of(list(knobs))
        if len(array) == 0:
            empty = np.zeros((3, 0))
            return PredictionArray(
                knobs=array,
                tokens_per_s_quantiles=empty,
                cycle_ms_quantiles=empty,
                accept_length_quantiles=empty,
                memory_gib=np.zeros(0),
                feasible=np.zeros(0, dtype=bool),
            )
        self._check(any(tree != OFF for tree in array.trees))
        cells, inverse = _cells(array, self.step.collectives)
        rows, tree_U = _rows_of_cells(array, cells, workload)
        fast, slow = self._totals(rows, tree_U, False), self._totals(rows, tree_U, True)
        tau_TS = np.stack([self._tau_of_tree(tree) for tree in array.trees])
        cycle = self._quantiles(fast, slow)
        speed = self._speed_quantiles(fast, slow, tau_TS[tree_U], workload)
        memory, _ = self._memory(rows, workload, with_reason=False)
        feasible = memory * 2**30 <= self.step.device(1).memory_bytes * USABLE
        tau = np.quantile(tau_TS, [0.05, 0.5, 0.95], axis=1)
        return PredictionArray(
            knobs=array,
            tokens_per_s_quantiles=np.take(speed, inverse, axis=1),
            cycle_ms_quantiles=np.take(cycle, inverse, axis=1),
            accept_length_quantiles=np.take(tau, array.tree_code, axis=1),
            memory_gib=memory[inverse],
            feasible=feasible[inverse],
        )

    def updated(self, observations: Sequence[Observation]) -> "Predictor":
        """The predictor after these measurements: constants and acceptance both learn."""
        calibration = calibrate(self.calibration, observations, self.step)
        counts = [o for o in observations if isinstance(o, AcceptanceCounts)]
        return replace(self, calibration=calibration, acceptance=self.acceptance.update(counts))

    def inert(self, knobs: Knobs) -> tuple[Inert, ...]:
        """Knobs that cannot change the outcome here, each with the reason."""
        return breakeven.inert_knobs(self.step, knobs)

    def _check(self, speculative: bool) -> None:
        if speculative and self.draft is None:
            raise ValueError(
                "speculation.method eagle3 needs a draft model: give draft: in the study"
            )

    def _terms(self, rows: StepRows, *, slow: bool) -> dict[str, Array]:
        """Terms [D, U]: row 0 at the fitted constants, row 1 + k with constant k moved."""
        num = len(self.calibration.names)
        probes = np.concatenate([np.zeros((1, num)), _DELTA * np.eye(num)])
        c = as_mapping(self.calibration.constants, self.calibration.x + probes)
        shape = (num + 1, rows.tp.size)
        terms = self.step.terms_ms(rows, c, slow)
        return {name: np.broadcast_to(value, shape) for name, value in terms.items()}

    def _totals(self, rows: StepRows, tree_U: NDArray[np.intp], slow: bool) -> Array:
        """Cycle times [D, U]; each phase is timed once per distinct phase and gathered."""
        code = rows.key_index * 2 + rows.numa
        bits = rows.graph_verify * 1 + rows.graph_decode * 2
        phases: tuple[tuple[str, tuple[Array, ...]], ...] = (
            ("target", (tree_U, code, bits)),
            ("draft", (rows.steps, rows.topk, code, rows.graph_draft)),
            ("extend", (rows.steps, code, rows.graph_extend)),
        )
        kind, kind_inverse = _unique((rows.speculative,))
        host = self._terms(rows.take(kind), slow=slow)
        total = np.take(host["sample"] + host["host_gap"], kind_inverse, axis=1)
        for name, columns in phases:
            index, inverse = _unique(columns)
            terms = self._terms(rows.take(index), slow=slow)
            parts = [value for key, value in terms.items() if key.split(".")[0] == name]
            if parts:
                total += np.take(np.sum(np.stack(parts), axis=0), inverse, axis=1)
        return total

    def _log_sd(self, values_DU: Array) -> tuple[Array, Array]:
        """(log median [U], log sd [U]) from the constants' covariance and the residual."""
        base = np.maximum(values_DU[0], 1e-12)
        gradient_KU = (values_DU[1:] / base - 1.0) / _DELTA
        root = np.linalg.cholesky(self.calibration.covariance + 1e-14 * np.eye(len(gradient_KU)))
        spread = root.T @ gradient_KU
        variance = np.einsum("ku,ku->u", spread, spread) + self.calibration["discrepancy"] ** 2
        return np.log(base), np.sqrt(variance)

    def _quantiles(self, fast_DU: Array, slow_DU: Array) -> Array:
        log_fast, sd_fast = self._log_sd(fast_DU)
        log_slow, sd_slow = self._log_sd(slow_DU)
        jitter = self.calibration["host_jitter"]
        eager = np.abs(log_slow - log_fast) > 1e-9
        sd_fast = np.where(eager, np.hypot(sd_fast, jitter), sd_fast)
        sd_slow = np.where(eager, np.hypot(sd_slow, jitter), sd_slow)
        share = self.calibration["host_slow_share"]
        return mixture_quantiles(log_fast, sd_fast, log_slow, sd_slow, share)

    def _speed_quantiles(
        self, fast_DU: Array, slow_DU: Array, tau_US: Array, workload: Workload
    ) -> Array:
        """Tokens/s [3, U]: requests x accept length / cycle."""
        log_tau = np.log(tau_US)
        centre, spread = log_tau.mean(axis=1), log_tau.std(axis=1)
        tokens = np.log(workload.concurrency * 1e3) + centre
        log_fast, sd_fast = self._log_sd(fast_DU)
        log_slow, sd_slow = self._log_sd(slow_DU)
        jitter = np.where(np.abs(log_slow - log_fast) > 1e-9, self.calibration["host_jitter"], 0.0)
        sd_fast = np.sqrt(sd_fast**2 + spread**2 + jitter**2)
        sd_slow = np.sqrt(sd_slow**2 + spread**2 + jitter**2)
        share = self.calibration["host_slow_share"]
        return mixture_quantiles(tokens - log_fast, sd_fast, tokens - log_slow, sd_slow, share)

    def _tau_samples(self, knobs: Knobs) -> Array:
        return self._tau_of_tree((knobs.method, knobs.steps, knobs.topk, knobs.draft_tokens))

    def _tau_of_tree(self, tree: tuple[str, int, int, int]) -> Array:
        if tree == OFF:
            return np.ones(len(self.acceptance.samples))
        return self.acceptance.accept_length_samples(*tree[1:])

    def _memory(
        self, rows: StepRows, workload: Workload, *, with_reason: bool = True
    ) -> tuple[Array, list[str | None]]:
        use = memory_use(
            self.target,
            self.draft,
            tp=rows.tp,
            speculative=rows.speculative,
            draft_tokens=rows.draft_tokens,
            num_graphs=rows.graph_decode * 1.0
            + rows.graph_draft
            + rows.graph_verify
            + rows.graph_extend,
            requests=workload.concurrency,
            max_context=workload.input_len + workload.output_len,
            device=self.step.device(1),
        )
        gib = use.total / 2**30
        return gib, [
            use.problem(i, self.step.device(1)) for i in range(gib.size)
        ] if with_reason else []


def _unique(columns: Sequence[Array]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(first index, inverse) of the distinct rows of small integer columns."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values = np.asarray(column, dtype=np.int64)
        code = code * (int(values.max()) + 1) + values
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


def _cells(
    array: KnobsArray, collectives: CollectiveTimes
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Distinct steps of an array: (index of one point of each cell, cell of each point)."""
    classes = np.array(collectives.classes(array.keys), dtype=np.int64)
    numa = np.array([host[0] for host in array.hosts], dtype=np.int64)
    sizes = (len(array.trees), int(classes.max()) + 1, 2, 16)
    code = array.tree_code.astype(np.int64) * sizes[1] + classes[array.key_code]
    code = (code * 2 + numa[array.host_code]) * 16 + array.graph_bits
    total = int(np.prod(sizes))
    if total > 8 * len(array) + 1_000_000:
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse
    # few possible cells: mark and count instead of sorting
    first = np.full(total, -1, dtype=np.int64)
    first[code[::-1]] = np.arange(len(array) - 1, -1, -1)
    present = np.flatnonzero(first >= 0)
    number = np.zeros(total, dtype=np.int64)
    number[present] = np.arange(present.size)
    return first[present], number[code]


def _rows_of_cells(
    array: KnobsArray, cells: NDArray[np.intp], workload: Workload
) -> tuple[StepRows, NDArray[np.intp]]:
    tree = array.tree_code[cells]
    tables = np.array([t[1:] for t in array.trees], dtype=float).reshape(-1, 3)
    bits = array.graph_bits[cells]
    tp = np.array([key.tp for key in array.keys], dtype=float)
    numa = np.array([host[0] for host in array.hosts], dtype=bool)
    rows = StepRows(
        speculative=np.array([t != OFF for t in array.trees])[tree],
        steps=tables[tree, 0],
        topk=tables[tree, 1],
        draft_tokens=tables[tree, 2],
        key_index=array.key_code[cells].astype(np.int64),
        keys=array.keys,
        tp=tp[array.key_code[cells]],
        numa=numa[array.host_code[cells]],
        graph_decode=(bits & 1) > 0,
        graph_draft=(bits & 2) > 0,
        graph_verify=(bits & 4) > 0,
        graph_extend=(bits & 8) > 0,
        requests=np.full(cells.size, float(workload.concurrency)),
        context=np.full(cells.size, float(workload.context)),
    )
    return rows, tree.astype(np.intp)


def _source(term: str) -> str:
    """Term name of ``model.spec`` -> name in ``StepModel.terms_ms``."""
    head, _, sub = term.partition(".")
    return f"target.{sub}" if sub in SUB_TERMS else head


def _total(terms: Mapping[str, Array]) -> Array:
    total: Array = np.sum(np.stack(list(terms.values())), axis=0)
    return total


def _interval(low_median_high: Array) -> Interval:
    low, median, high = (float(v) for v in low_median_high)
    return Interval(median, low, high)
