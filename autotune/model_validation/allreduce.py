"""All-reduce rows: constants fitted on other rows (or the machine's priors), these predicted."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from autotune.errors import UserError
from autotune.model_validation.scores import Outcome, of_this_gpu
from model.allreduce.calibrate import (
    AllreduceFit,
    Rows,
    fit_rows,
    prior_fit,
    specs_for,
)
from model.allreduce.data import Record, build_rows, read_records
from model.machine import Machine

#: training rows of its own that a series needs
_LEAST_ROWS = 8


def predict_allreduce(machine: Machine, data: Sequence[Path], train: Sequence[Path]) -> Outcome:
    """Predict all rows of ``data`` that the machine can run; raises ``UserError`` if it has none.

    Headline rows: the graphed time (the GPU's) of each collective, the eager one without it.
    """
    notes: list[str] = []
    skipped: Counter[str] = Counter()
    records, rows = usable(machine, data, notes, skipped)
    fits = ReduceFits(machine, train, rows, notes)
    quantiles = np.zeros((3, len(rows)))
    series = np.array([series_of(record) for record in records])
    unknown: dict[str, None] = {}
    for name in dict.fromkeys(series.tolist()):
        mask = series == name
        part = rows.take(mask)
        fitted = fits.of(name)
        predicted = fitted.predict(part.design, part.graphed)
        quantiles[:, mask] = [predicted.low_us, predicted.median_us, predicted.high_us]
        unknown |= dict.fromkeys(fitted.unidentifiable(part.design))
    timed = {_what(r) for r in records if r.graphed}
    if unknown:
        notes.append(f"the data cannot tell: {', '.join(unknown)}")
    return Outcome(
        unit="us",
        measured=rows.time_us,
        quantiles=quantiles,
        labels=tuple(f"{_group(r)}, {r.size_bytes} B" for r in records),
        groups=tuple(_group(r) for r in records),
        headline=np.array([r.graphed or _what(r) not in timed for r in records], dtype=bool),
        skipped=dict(skipped),
        notes=tuple(notes),
    )


class ReduceFits:
    """Constants by series: from training rows of the same series, else from all of them."""

    def __init__(
        self, machine: Machine, train: Sequence[Path], wanted: Rows, notes: list[str]
    ) -> None:
        self._wanted, self._notes = wanted, notes
        self._seen: Rows | None = None
        self._series: npt.NDArray[np.str_] = np.array([], dtype=str)
        self._fits: dict[str, AllreduceFit] = {}
        if not train:
            notes.append("all-reduce constants are priors: no --fit file holds all-reduce rows")
            return
        left_out: Counter[str] = Counter()
        records, self._seen = usable(machine, train, notes, left_out)
        self._series = np.array([series_of(record) for record in records])
        notes += [f"--fit: left out {count} rows: {reason}" for reason, count in left_out.items()]

    def of(self, series: str) -> AllreduceFit:
        """Constants for rows of one series."""
        if self._seen is None:
            return prior_fit(specs_for(self._wanted))
        same = self._series == series
        enough = int(same.sum()) >= _LEAST_ROWS
        key = series if enough else ""
        if key not in self._fits:
            specs = specs_for(Rows.concat([self._seen, self._wanted]))
            self._fits[key] = fit_rows(self._seen.take(same) if enough else self._seen, specs)
            if not enough:
                self._notes.append(f"{series}: --fit has too few such rows, all of it is used")
        return self._fits[key]


def series_of(record: Record) -> str:
    """What was measured as one: a table's software and mode, or the link of environment rows.

    Versions, hosts and harnesses differ between series, so one set of constants fits none of them.
    """
    if record.gpu is None:
        return record.link or "rows"
    return record.group.removeprefix(f"{record.gpu} ").rpartition(" ")[0]


def usable(
    machine: Machine, paths: Sequence[Path], notes: list[str], skipped: Counter[str]
) -> tuple[list[Record], Rows]:
    """Rows of the files that this machine can run, as records and as designs."""
    found = [(path, record) for path in paths for record in _records(path)]
    gpu = None if machine.gpu is None else machine.gpu.name
    own = of_this_gpu([record.gpu for _, record in found], gpu)
    if not own.any():
        others = ", ".join(sorted({str(r.gpu) for _, r in found}))
        notes.append(f"rows of {others}, predicted as if measured on {machine.name} ({gpu})")
        own[:] = True
    records, parts = [], []
    for (_, record), mine in zip(found, own, strict=True):
        if not mine:
            skipped[f"of GPU {record.gpu}, not the machine's {gpu}"] += 1
            continue
        try:
            row = build_rows(machine, [record])
        except ValueError as error:
            skipped[str(error)] += 1
            continue
        reason = _other_way(record, row)
        if reason is not None:
            skipped[reason] += 1
            continue
        records.append(record)
        parts.append(row)
    if not parts:
        files = ", ".join(str(path) for path in paths)
        why = "; ".join(f"{count} rows: {reason}" for reason, count in skipped.items())
        raise UserError(f"{files}: no row that {machine.name} can run: {why}")
    return records, Rows.concat(parts)


def _records(path: Path) -> list[Record]:
    try:
        return read_records(path)
    except ValueError as error:
        raise UserError(str(error)) from None


def _other_way(record: Record, row: Rows) -> str | None:
    """Why a row that names its link did not go the way that this machine's traffic goes."""
    link = (record.link or "").lower()
    shares = {
        "nvlink": float(row.design.share_nvlink[0]),
        "shm": float(row.design.share_shm[0]),
        "p2p": float(row.design.share_p2p[0]),
    }
    named = next((way for way in shares if link.startswith(way)), None)
    if named is None or row.design.gloo[0] or shares[named] > 0:
        return None
    here = max(shares, key=lambda way: shares[way])
    return f"measured through {link}, but on this machine they go through {here}"


def _what(record: Record) -> tuple[object, ...]:
    return record.group, record.num_ranks, record.size_bytes


def _group(record: Record) -> str:
    mode = "graphed" if record.graphed else "eager"
    if record.gpu is not None:
        return record.group
    return f"{record.num_ranks} ranks, {record.group or 'no settings'}, {mode}"
