"""Measured synthetic steps: device, all-reduce and host constants fitted apart, steps predicted.

Device constants come from ``graph_no_allreduce_us``, the host's launch costs from the eager
columns, all-reduce constants from all-reduce files. ``graph_us`` is predicted and never fitted.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.errors import UserError
from autotune.model_validation.allreduce import ReduceFits
from autotune.model_validation.scores import Outcome
from model.allreduce.calibrate import Rows
from model.allreduce.model import allreduce_design
from model.calibration import Calibration, default_calibration
from model.compute import Device
from model.constants import as_mapping
from model.intervals import Z90
from model.machine import Machine
from model.nccl.settings import NcclSettings
from model.robust import Fit
from model.step_rows import (
    StepRow,
    device_priors,
    device_us,
    fit_device,
    fit_host,
    prior_host,
    read_step_rows,
)

Array = NDArray[np.float64]
#: what the formula leaves out of a captured step, relative
_STEP_SD = 0.02
_DELTA = 1e-4


def predict_steps(
    machine: Machine, data: Sequence[Path], steps: Sequence[Path], reduces: Sequence[Path]
) -> Outcome:
    """Predict captured and eager steps of ``data``; ``steps`` and ``reduces`` are fitted.

    The headline is the captured step. Raises ``UserError``.
    """
    if machine.gpu is None:
        raise UserError(f"{machine.name} has no GPU: step rows are of GPUs")
    notes = ["graph_us is never fitted"]
    skipped: Counter[str] = Counter()
    rows = [row for row in _rows(data) if _runs(machine, row, skipped)]
    if not rows:
        why = "; ".join(f"{count} rows: {reason}" for reason, count in skipped.items())
        raise UserError(f"{', '.join(map(str, data))}: no row that {machine.name} can run: {why}")
    left_out: Counter[str] = Counter()
    seen = [row for row in _rows(steps) if _runs(machine, row, left_out)]
    notes += [f"--fit: left out {count} rows: {reason}" for reason, count in left_out.items()]
    if not seen:
        notes.append("device and host constants are priors: no --fit file holds steps")
    calibration = default_calibration(machine)
    collectives = _collectives(machine, rows)
    fits = ReduceFits(machine, reduces, collectives, notes)
    graphed, device = _graphed(machine, calibration, rows, seen, fits, collectives)
    host = fit_host(seen) if seen else prior_host(calibration)
    eager = host.quantiles_us(rows, device)
    names = [_name(row) for row in rows]
    count = len(rows)
    return Outcome(
        unit="us",
        measured=np.array([r.graph_us for r in rows] + [r.eager_us for r in rows]),
        quantiles=np.concatenate([graphed, eager], axis=1),
        labels=tuple(f"{name}, {kind}" for kind in ("graphed", "eager") for name in names),
        groups=tuple(["graphed"] * count + ["eager"] * count),
        headline=np.arange(2 * count) < count,
        skipped=dict(skipped),
        notes=tuple(notes),
    )


def _graphed(
    machine: Machine,
    calibration: Calibration,
    rows: Sequence[StepRow],
    seen: Sequence[StepRow],
    fits: ReduceFits,
    collectives: Rows,
) -> tuple[Array, Array]:
    """(quantiles [3, N] of captured steps, device time without all-reduces [N]), us."""
    ranks = machine.num_gpus
    device = Device.of(machine, ranks)
    priors = device_priors(calibration.constants)
    fit = fit_device(seen, device, priors) if seen else _prior(calibration, priors)
    moved = np.concatenate([fit.x[None], fit.x + _DELTA * np.eye(fit.x.size)])
    compute = device_us(rows, device, as_mapping(priors, moved))
    one_us, one_sd = np.zeros(len(rows)), np.zeros(len(rows))
    links = np.array([row.link for row in rows])
    for link in dict.fromkeys(links.tolist()):
        mask = links == link
        part = collectives.take(mask)
        reduce_fit = fits.of(link)
        one = reduce_fit.predict(part.design, part.graphed)
        # the repeats of one collective average their noise out, an error of the constants stays
        noise = reduce_fit.graphed_log_sd
        one_us[mask] = one.median_us
        one_sd[mask] = np.sqrt(np.maximum(one.log_sd**2 - 0.75 * noise**2, 0.0))
    count = np.array([row.collectives for row in rows])
    tp = collectives.design.num_ranks
    in_step = one_us * calibration["allreduce_factor"] + calibration["skew_us"] * np.log2(tp)
    total = compute[0] + count * in_step
    gradient = (compute[1:] - compute[0]) / _DELTA
    variance = np.einsum("kn,kj,jn->n", gradient, fit.covariance, gradient)
    factor_sd = calibration.constant("allreduce_factor").prior_sd
    variance += (count * in_step) ** 2 * (one_sd**2 + factor_sd**2) + (_STEP_SD * total) ** 2
    sd = np.sqrt(variance) / total
    z = np.array([[-Z90], [0.0], [Z90]])
    return np.exp(np.log(total) + z * sd), compute[0]


def _prior(calibration: Calibration, priors: Sequence[object]) -> Fit:
    index = [calibration.names.index(p.name) for p in priors]  # type: ignore[attr-defined]
    covariance = calibration.covariance[np.ix_(index, index)]
    return Fit(calibration.x[index], covariance, np.zeros(0), 0.0)


def _collectives(machine: Machine, rows: Sequence[StepRow]) -> Rows:
    designs = [
        allreduce_design(
            machine,
            row.num_ranks,
            "nccl",
            NcclSettings.from_env(dict(row.env)),
            machine.software.nccl_version or "2.28.9",
            [row.allreduce_bytes],
        )
        for row in rows
    ]
    design = type(designs[0]).concat(designs)
    return Rows(design=design, time_us=np.ones(len(rows)), graphed=np.ones(len(rows), dtype=bool))


def _runs(machine: Machine, row: StepRow, skipped: Counter[str]) -> bool:
    """Whether this machine's traffic goes the way that the row names, its settings allowed."""
    try:
        design = _collectives(machine, [row]).design
    except ValueError as error:
        skipped[str(error)] += 1
        return False
    here = max(("nvlink", "shm", "p2p"), key=lambda way: getattr(design, f"share_{way}")[0])
    known = row.link.lower().startswith(("nvlink", "shm", "p2p"))
    if known and not row.link.lower().startswith(here):
        skipped[f"measured through {row.link}, but on this machine they go through {here}"] += 1
        return False
    return True


def _rows(paths: Sequence[Path]) -> list[StepRow]:
    try:
        return [row for path in paths for row in read_step_rows(path)]
    except ValueError as error:
        raise UserError(str(error)) from None


def _name(row: StepRow) -> str:
    env = " ".join(f"{k.removeprefix('NCCL_')}={v}" for k, v in sorted(row.env.items()))
    return f"{row.link} {env}, {row.tokens} tokens".replace("  ", " ")
