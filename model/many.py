"""Cycle times of many knobs: each phase is timed once per distinct phase, cells gather.

A cell is a distinct step: tree, collective class, host setting and graphs. Its time is the sum of
its phases, and so is the gradient by the constants. Gradients are kept in the few directions of the
constants' covariance that matter here. A gradient sees what binds at the fitted values and nothing
else, so each phase is also timed at both ends of every direction's 90 % interval, where its
launches, a link or a path between sockets may bind instead: that gives the factors by which the
spread is larger towards longer, and towards shorter, times.
D constant vectors, P phases, U cells, K constants, R directions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.calibration import Calibration
from model.compute import Constants
from model.constants import as_mapping
from model.intervals import Z90
from model.step import StepModel, all_captured, expected_maximum
from model.step_columns import StepRows

Array = NDArray[Any]

#: step of the finite differences on the constants' scales
DELTA = 1e-3
#: share of the summed variance that the kept directions must hold
_KEPT = 0.9999
#: share of a time that the low end of its interval takes off at most: the parts' ends add up as if
#: independent, and could pass the whole
_MOST_SHORTER = 0.97


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of a log time [U] towards shorter and towards longer times."""

    down: Array
    up: Array


@dataclass(frozen=True, slots=True)
class CycleTimes:
    """Cells' cycles in the host's fast and slow mode: ms [U] and the spread of their logs."""

    fast: Array
    fast_sd: Spread
    slow: Array
    slow_sd: Spread


def probes(calibration: Calibration) -> Constants:
    """Constants [D, 1]: row 0 as fitted, row 1 + k with constant k moved by ``DELTA``."""
    num = len(calibration.names)
    moves = np.concatenate([np.zeros((1, num)), DELTA * np.eye(num)])
    return as_mapping(calibration.constants, calibration.x + moves)


def ends(calibration: Calibration) -> Constants:
    """Constants [1 + 2 K, 1]: as fitted, then each direction at its low and at its high end."""
    moves = Z90 * _root(calibration).T
    none = np.zeros((1, len(calibration.names)))
    return as_mapping(calibration.constants, calibration.x + np.concatenate([none, -moves, moves]))


def log_sd(values_DU: Array) -> Spread:
    """Spread of the log of each column over the rows of ``ends``."""
    base = np.maximum(values_DU[0], 1e-12)
    # a term that is not there (one rank's all-reduce) has no uncertainty
    moved = np.where(values_DU[0] > 1e-12, np.maximum(values_DU[1:], 1e-12) / base, 1.0)
    low, high = np.log(moved.reshape(2, -1, base.size))
    shorter, longer = np.minimum(np.minimum(low, high), 0.0), np.maximum(np.maximum(low, high), 0.0)
    return Spread(
        np.sqrt(np.einsum("ku,ku->u", shorter, shorter)) / Z90,
        np.sqrt(np.einsum("ku,ku->u", longer, longer)) / Z90,
    )


def cycle_times(step: StepModel, calibration: Calibration, rows: StepRows) -> CycleTimes:
    """Times of all rows (cells); see the module docstring."""
    near = _phase_values(step, rows, probes(calibration), len(calibration.names) + 1)
    far = _phase_values(step, rows, ends(calibration), 2 * len(calibration.names) + 1)
    root = _root(calibration)
    basis = _basis(root, [values for pair, _ in near for values in pair])
    modes: list[tuple[Array, Spread]] = []
    for mode in (0, 1):
        total, along = np.zeros(rows.tp.size), np.zeros((rows.tp.size, basis.shape[1]))
        #: variance of the phases taken apart, us2: by the gradient, towards shorter, towards longer
        apart = np.zeros((3, rows.tp.size))
        for (pair, inverse), (wide, _) in zip(near, far, strict=True):
            values = pair[mode]
            total += values[0][inverse]
            gradient = (values[1:] - values[0]) / DELTA
            along += np.ascontiguousarray((basis.T @ gradient).T)[inverse]
            apart += _variances(root.T @ gradient, wide[mode])[:, inverse]
        sd = np.sqrt(np.einsum("ur,ur->u", along, along)) / total
        least = 1e-12 * np.maximum(total, 1.0) ** 2
        down, up = np.sqrt((apart[1:] + least) / (apart[0] + least))
        modes.append((total / 1e3, _of_log(sd * down, sd * up)))
    return CycleTimes(*modes[0], *modes[1])


def _of_log(down: Array, up: Array) -> Spread:
    """Spread of the log from what a time moves to each side, as a share of it and one sd.

    The ends of a 90 % interval are kept: a rate ten times lower is ten times the time, once.
    """
    lowest = np.minimum(Z90 * down, _MOST_SHORTER)
    return Spread(-np.log1p(-lowest) / Z90, np.log1p(Z90 * up) / Z90)


def _phase_values(
    step: StepModel, rows: StepRows, c: Constants, num: int
) -> list[tuple[tuple[Array, Array], NDArray[np.intp]]]:
    """Of each kind of phase: (times [num, P] in the fast and in the slow mode, phase by row)."""
    found = []
    for columns, run in _phases(step, rows, c):
        first, inverse = _unique(columns)
        fast, slow = (np.broadcast_to(v, (num, first.size)) for v in run(rows.take(first)))
        found.append(((fast, slow), inverse))
    return found


def _variances(linear_KP: Array, ends_DP: Array) -> Array:
    """[3, P]: variance by the gradient, and what it is towards shorter and longer times."""
    low, high = (ends_DP[1:] - ends_DP[0]).reshape(2, -1, ends_DP.shape[1]) / Z90
    shorter = np.minimum(np.minimum(low, high), 0.0)
    longer = np.maximum(np.maximum(low, high), 0.0)
    return np.stack([np.einsum("kp,kp->p", v, v) for v in (linear_KP, shorter, longer)])


def _phases(
    step: StepModel, rows: StepRows, c: Constants
) -> list[tuple[Sequence[Array], Callable[[StepRows], tuple[Array, Array]]]]:
    """(columns that tell phases apart, time of such rows in both modes)."""
    tokens = np.where(rows.speculative, rows.draft_tokens, 1.0)
    graphed = np.where(rows.speculative, rows.graph_verify, rows.graph_decode)
    key = rows.key_index

    def target(r: StepRows) -> tuple[Array, Array]:
        return _two_modes(step, "target", r, c)

    def draft(r: StepRows) -> tuple[Array, Array]:
        return _two_modes(step, "draft", r, c)

    def extend(r: StepRows) -> tuple[Array, Array]:
        return _two_modes(step, "extend", r, c)

    def host(r: StepRows) -> tuple[Array, Array]:
        sample, gap = step.host_us(r, c)
        return sample + gap, sample + gap

    found: list[tuple[Sequence[Array], Callable[[StepRows], tuple[Array, Array]]]] = [
        ((rows.speculative, tokens, key, rows.numa, graphed), target),
        ((rows.speculative, rows.numa, all_captured(rows)), host),
    ]
    if step.draft is not None and rows.speculative.any():
        spec = rows.speculative
        found += [
            ((spec, rows.steps, rows.topk, key, rows.numa, rows.graph_draft), draft),
            ((spec, rows.steps, key, rows.numa, rows.graph_extend), extend),
        ]
    return found


def _two_modes(step: StepModel, phase: str, rows: StepRows, c: Constants) -> tuple[Array, Array]:
    """Time of a phase in the fast and the slow host mode, us [D, P]."""
    device, host = step.phase_us(phase, rows, c)
    if not step.device(1).is_gpu:
        return device + host, device + host * c["host_slow_ratio"]
    slowest = host * (1.0 + c["host_jitter"] * expected_maximum(rows.tp))
    graphed = rows.graph_draft if phase == "draft" else rows.graph_extend
    if phase == "target":
        graphed = np.where(rows.speculative, rows.graph_verify, rows.graph_decode)
    captured = device + c["graph_launch_us"]
    live = np.ones(rows.tp.size) if phase == "target" else rows.speculative
    fast = np.where(graphed, captured, np.maximum(device, slowest))
    slow = np.where(graphed, captured, np.maximum(device, slowest * c["host_slow_ratio"]))
    return fast * live, slow * live


def _root(calibration: Calibration) -> Array:
    result: Array = np.linalg.cholesky(
        calibration.covariance + 1e-14 * np.eye(len(calibration.names))
    )
    return result


def _basis(root_KK: Array, tables: Sequence[Array]) -> Array:
    """Directions [K, R] (covariance applied) that hold nearly all variance of the phases."""
    gram = np.zeros_like(root_KK)
    for values in tables:
        gradient = root_KK.T @ ((values[1:] - values[0]) / DELTA)
        gram += gradient @ gradient.T
    weight, vectors = np.linalg.eigh(gram)
    order = np.argsort(-weight)
    held = np.cumsum(weight[order]) / max(weight.sum(), 1e-30)
    keep = order[: int(np.searchsorted(held, _KEPT)) + 1]
    result: Array = root_KK @ vectors[:, keep]
    return result


def _unique(columns: Sequence[Array]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(first index, inverse) of the distinct rows of small non-negative integer columns."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        values = np.asarray(column, dtype=np.int64)
        width = int(values.max()) + 1
        code = code * width + values
        size *= width
    return distinct(code, size)


def distinct(code: Array, size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(first index, inverse) of codes below ``size``: by marking when few codes are possible."""
    if size > 16 * code.size + 4_000_000:
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse
    first = np.full(size, -1, dtype=np.int64)
    first[code[::-1]] = np.arange(code.size - 1, -1, -1)
    present = np.flatnonzero(first >= 0)
    number = np.zeros(size, dtype=np.int64)
    number[present] = np.arange(present.size)
    return first[present], number[code]
