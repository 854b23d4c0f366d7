"""Predict every knobs of a space: time of each term, accept length, tokens per second.

All uncertainty travels to the result: the constants' covariance by linearisation, the acceptance
posterior by its samples, the host's two launch modes as a mixture, and a residual for what the
formulas leave out. Knobs that share a tree, effective collective and graphs share their step, so
the step model runs once per distinct step and a large space is a gather.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import breakeven
from model.acceptance import AcceptanceModel
from model.calibration import Calibration
from model.collectives import CollectiveKey, CollectiveTimes
from model.intervals import mixture_quantiles
from model.knobs_array import OFF, KnobsArray
from model.machine import Machine
from model.many import CycleTimes, Spread, cycle_times, distinct, ends, log_sd
from model.memory import USABLE, memory_use
from model.observations import AcceptanceCounts, AcceptLength, Observation
from model.servers import server_of
from model.shapes import DraftShape, ModelShape
from model.spec import CYCLE_TERMS, DECODE_TERMS, Inert, Interval, Knobs, Prediction, Workload
from model.step import SUB_TERMS, StepModel
from model.step_columns import StepRows
from model.wave import Wave, wave

Array = NDArray[Any]

_COLD = (
    "weights are read cold from DRAM: the L2 residency that speeds up stand-alone MoE benchmarks "
    "is zero inside a step of many layers",
)


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
        collectives = _collectives(self.machine)
        server = server_of(self.calibration.server, self.machine)
        object.__setattr__(
            self, "_step", StepModel(self.target, self.draft, self.machine, collectives, server)
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
            name: _interval(
                self._mixtures(
                    self._times(fast[source], slow[source]),
                    0.0,
                    0.0,
                    workload,
                    self.calibration.residual(source),
                )[0][:, 0]
            )
            for name in names
            for source in (_source(name),)
        }
        tree = (knobs.method, knobs.steps, knobs.topk, knobs.draft_tokens)
        tau_S = self._tau_of_tree(tree, workload)
        batch = self.batch(knobs, workload)
        times = cycle_times(self.step, self.calibration, rows)
        cycle, speed = self._mixtures(times, batch.log_tau, batch.log_sd, workload)
        memory, reasons = self._memory(rows, workload)
        reason = (
            self.target.head_problem(knobs.tp)
            or self.step.collectives.problem(CollectiveKey.of(knobs))
            or reasons[0]
        )
        return Prediction(
            knobs=knobs,
            workload=workload,
            calibration_id=self.calibration.id,
            terms_ms=terms,
            cycle_ms=_interval(cycle[:, 0]),
            accept_length=_interval(np.quantile(tau_S, [0.05, 0.5, 0.95])),
            tokens_per_s=_interval(speed[:, 0]),
            speed_of_light_ms=breakeven.speed_of_light_ms(self.step, knobs, workload, prefix),
            memory_gib_per_gpu=float(memory[0]),
            feasible=reason is None,
            infeasible_reason=reason,
            inert=self.inert(knobs, workload),
            notes=_COLD if self.target.moe_layers and self.step.device(1).is_gpu else (),
        )

    def verify_ms(self, knobs: Knobs, workload: Workload) -> Interval:
        """The whole target forward (verify, or the plain decode step), ms."""
        rows = StepRows.of([knobs], [workload])
        fast, slow = (
            _total({n: v for n, v in self._terms(rows, slow=mode).items() if n[:6] == "target"})
            for mode in (False, True)
        )
        return _interval(self._mixtures(self._times(fast, slow), 0.0, 0.0, workload)[0][:, 0])

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
        sizes = self.step.message_sizes(array.trees, workload.concurrency)
        classes = np.array(self.step.collectives.classes(array.keys, sizes), dtype=np.int64)
        cells, inverse = _cells(array, classes)
        _, first_key, class_of_key = np.unique(classes, return_index=True, return_inverse=True)
        rows, tree = _rows_of_cells(array, cells, first_key[class_of_key], workload)
        times = cycle_times(self.step, self.calibration, rows)
        tau_TS = np.stack([self._tau_of_tree(t, workload) for t in array.trees])
        batches = [self._wave(t, workload) for t in array.trees]
        log_tau = np.array([batch.log_tau for batch in batches])
        log_sd = np.array([batch.log_sd for batch in batches])
        cycle, speed = self._mixtures(times, log_tau[tree], log_sd[tree], workload)
        memory, _ = self._memory(rows, workload, with_reason=False)
        feasible = memory * 2**30 <= self.step.device(1).memory_bytes * USABLE
        heads = np.array([self.target.head_problem(key.tp) is None for key in array.keys])
        feasible &= ((classes >= 0) & heads)[array.key_code[cells]]
        tau = np.quantile(tau_TS, [0.05, 0.5, 0.95], axis=1)
        return PredictionArray(
            knobs=array,
            tokens_per_s_quantiles=np.take(speed, inverse, axis=1),
            cycle_ms_quantiles=np.take(cycle, inverse, axis=1),
            accept_length_quantiles=np.take(tau, array.tree_code, axis=1),
            memory_gib=memory[inverse],
            feasible=feasible[inverse],
        )

    def batch(self, knobs: Knobs, workload: Workload) -> Wave:
        """Tokens of a cycle and request as a whole measurement of these knobs shows them."""
        tree = (knobs.method, knobs.steps, knobs.topk, knobs.draft_tokens)
        return self._wave(tree, workload)

    def updated(self, observations: Sequence[Observation]) -> "Predictor":
        """The predictor after these measurements: constants and acceptance both learn."""
        from model.calibrate import calibrate

        calibration = calibrate(self.calibration, observations, self.step)
        counts = [o for o in observations if isinstance(o, AcceptanceCounts | AcceptLength)]
        return replace(self, calibration=calibration, acceptance=self.acceptance.update(counts))

    def inert(self, knobs: Knobs, workload: Workload) -> tuple[Inert, ...]:
        """Knobs that cannot change the outcome here, each with the reason."""
        return breakeven.inert_knobs(self.step, knobs, workload)

    def _check(self, speculative: bool) -> None:
        if speculative and self.draft is None:
            raise ValueError(
                "speculation.method eagle3 needs a draft model: give draft: in the study"
            )

    def _terms(self, rows: StepRows, *, slow: bool) -> dict[str, Array]:
        """Terms, ms [D, U]: at the fitted constants, then at the ends of ``model.many.ends``."""
        shape = (2 * len(self.calibration.names) + 1, rows.tp.size)
        terms = self.step.terms_ms(rows, ends(self.calibration), slow)
        return {name: np.broadcast_to(value, shape) for name, value in terms.items()}

    def _times(self, fast_DU: Array, slow_DU: Array) -> CycleTimes:
        return CycleTimes(fast_DU[0], log_sd(fast_DU), slow_DU[0], log_sd(slow_DU))

    def _mixtures(
        self,
        times: CycleTimes,
        log_tau: Array | float,
        tau_sd: Array | float,
        workload: Workload,
        residual: float | None = None,
    ) -> tuple[Array, Array]:
        """Quantiles [3, U] of the time (ms) and of tokens/s = requests x accept length / time.

        ``residual``: relative sd of what the formulas leave out, by default that of a cycle.
        """
        base = np.maximum(times.fast, 1e-12), np.maximum(times.slow, 1e-12)
        log_fast, log_slow = np.log(base[0]), np.log(base[1])
        jitter = np.where(log_slow - log_fast > 1e-9, self.calibration["host_jitter"] ** 2, 0.0)
        if residual is None:
            extra = jitter + self._left_out(log_slow - log_fast) ** 2
        else:
            extra = jitter + residual**2
        share = self.calibration["host_slow_share"]
        tokens = np.log(workload.concurrency * 1e3) + log_tau

        def sides(spread: Spread, more: Any) -> tuple[Array, Array]:
            return np.sqrt(spread.down**2 + extra + more), np.sqrt(spread.up**2 + extra + more)

        fast, slow = sides(times.fast_sd, 0.0), sides(times.slow_sd, 0.0)
        shorter, longer = (
            mixture_quantiles(log_fast, fast[side], log_slow, slow[side], share) for side in (0, 1)
        )
        cycle = np.stack([shorter[0], np.sqrt(shorter[1] * longer[1]), longer[2]])
        square = np.asarray(tau_sd) ** 2
        fast, slow = sides(times.fast_sd, square), sides(times.slow_sd, square)
        faster, slower = (
            mixture_quantiles(tokens - log_fast, fast[side], tokens - log_slow, slow[side], share)
            for side in (0, 1)
        )
        speed = np.stack([slower[0], np.sqrt(slower[1] * faster[1]), faster[2]])
        return cycle, speed

    def _left_out(self, log_ratio: Array) -> Array:
        """Relative sd of what the formulas leave out of cycles, by how far launches bind them.

        ``log_ratio``: slow mode over fast mode; a cycle all of launches has the host's own ratio.
        """
        captured = self.calibration["discrepancy"]
        bound = np.clip(log_ratio / np.log(max(self.calibration["host_slow_ratio"], 1.01)), 0, 1)
        result: Array = captured + bound * (self.calibration.launched_residual - captured)
        return result

    def _tau_of_tree(self, tree: tuple[str, int, int, int], workload: Workload) -> Array:
        if tree == OFF:
            return np.ones(len(self.acceptance.samples))
        return self.acceptance.at(workload.concurrency).accept_length_samples(*tree[1:])

    def _wave(self, tree: tuple[str, int, int, int], workload: Workload) -> Wave:
        """What a whole measurement of this tree shows as its accept length."""
        return wave(
            self._tau_of_tree(tree, workload),
            tree[1],
            requests=workload.concurrency,
            # the prompt's forward gives the first token
            tokens=workload.output_len - 1,
            seen=workload.concurrency in self.acceptance.by_load,
            waves=self.step.server.waves,
        )

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


@lru_cache(maxsize=8)
def _collectives_of(dump: str) -> CollectiveTimes:
    return CollectiveTimes(Machine.model_validate_json(dump))


def _collectives(machine: Machine) -> CollectiveTimes:
    """Shared by all predictors of one machine: plans are looked up once."""
    return _collectives_of(machine.model_dump_json())


def _cells(array: KnobsArray, classes: Array) -> tuple[Array, Array]:
    """Distinct steps of an array: (index of one point of each cell, cell of each point)."""
    classes = classes + 1
    numa = np.array([host[0] for host in array.hosts], dtype=np.int64)
    sizes = (len(array.trees), int(classes.max()) + 1, 2, 16)
    code = array.tree_code.astype(np.int64) * sizes[1] + classes[array.key_code]
    code = (code * 2 + numa[array.host_code]) * 16 + array.graph_bits
    return distinct(code, int(np.prod(sizes)))


def _rows_of_cells(
    array: KnobsArray, cells: NDArray[np.intp], key_of: NDArray[np.intp], workload: Workload
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
        key_index=key_of[array.key_code[cells]].astype(np.int64),
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
