"""Accuracy of the all-reduce time model on measured rows that the fit has not seen.

    python -m bench.model_accuracy.allreduce [--json]

Published tables: leave one message size out, constants shared by the rank counts of one host and
mode. 2 x H200 through host memory: leave one NCCL environment out; then LL128, one channel and 16
channels left out altogether, and again with a probe of one size. Where NCCL switches protocol is
the selector's, never fitted.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.allreduce.calibrate import AllreduceFit, Predicted, Rows, fit_rows
from model.allreduce.data import Record, build_rows, read_records
from model.machine import load_machine

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "studies/results/published/allreduce-published.csv"
H200 = ROOT / "studies/results/published/allreduce-h200x2.jsonl"
MACHINES = ROOT / "studies/machines"
PRO, L40S = "RTX PRO 6000 Blackwell Server", "L40S"
HOSTS = {PRO: "8x-rtx-pro-6000-switches.yaml", L40S: "8x-l40s.yaml"}
#: the size at which a left-out protocol or channel count is probed, bytes
PROBE_BYTES = 1 << 20

Labels = npt.NDArray[np.str_]


@dataclass(frozen=True)
class Score:
    """Errors of predictions against rows; ``worst`` as (row, relative error)."""

    name: str
    rows: int
    mape: float
    median_ape: float
    max_ape: float
    coverage90: float
    median_width: float
    interval_score: float
    worst: list[tuple[str, float]]


@dataclass(frozen=True)
class LeftOut:
    """A protocol or channel count that was in no training row, then probed at one size."""

    name: str
    score: Score
    #: constants by share in the uncertainty of these rows, with posterior sd / prior sd
    dominant: list[tuple[str, float]]
    unidentifiable: list[str]
    probed: Score


@cache
def published(gpu: str) -> tuple[list[Record], Rows]:
    """All rows of one GPU in the published table, with its machine."""
    machine = load_machine(MACHINES / HOSTS[gpu])
    records = [record for record in read_records(PUBLISHED) if record.gpu == gpu]
    return records, build_rows(machine, records)


@cache
def h200(link: str) -> tuple[list[Record], Rows]:
    """2 x H200: rows through host memory ("shm-pcie5") or NVLink ("nvlink")."""
    name = "2x-h200-shm.yaml" if link == "shm-pcie5" else "2x-h200-nvlink.yaml"
    records = [record for record in read_records(H200) if record.group.startswith(link)]
    return records, build_rows(load_machine(MACHINES / name), records)


def cross_validate(
    rows: Rows, labels: Labels, fitting: Callable[[Rows], AllreduceFit] = fit_rows
) -> Predicted:
    """Predict the rows of each label from a fit of all others."""
    parts = {f: np.zeros(len(rows)) for f in ("median_us", "low_us", "high_us", "log_sd")}
    for label in np.unique(labels):
        left_out = labels == label
        fitted = fitting(rows.take(~left_out))
        seen = rows.take(left_out)
        predicted = fitted.predict(seen.design, seen.graphed)
        for field, values in parts.items():
            values[left_out] = getattr(predicted, field)
    return Predicted(**parts)


def score(name: str, rows: Rows, predicted: Predicted, records: Sequence[Record]) -> Score:
    """Errors, coverage and mean interval score (alpha 0.1, us) of predictions."""
    error = predicted.median_us / rows.time_us - 1.0
    order = np.argsort(-np.abs(error))[:3]
    return Score(
        name=name,
        rows=len(rows),
        mape=float(np.abs(error).mean()),
        median_ape=float(np.median(np.abs(error))),
        max_ape=float(np.abs(error).max()),
        coverage90=float(predicted.covers(rows.time_us).mean()),
        median_width=float(np.median((predicted.high_us - predicted.low_us) / predicted.median_us)),
        interval_score=interval_score(predicted.low_us, predicted.high_us, rows.time_us),
        worst=[
            (f"{records[i].num_ranks} x {records[i].size_bytes} B", float(error[i])) for i in order
        ],
    )


def interval_score(low: npt.ArrayLike, high: npt.ArrayLike, time_us: npt.ArrayLike) -> float:
    """Mean interval score (Gneiting and Raftery 2007) at 90 %, us: width plus 20 x any miss."""
    lo, hi, y = (np.asarray(v, dtype=float) for v in (low, high, time_us))
    return float((hi - lo + 20.0 * (np.maximum(lo - y, 0) + np.maximum(y - hi, 0))).mean())


def _subset(
    name: str,
    records: Sequence[Record],
    rows: Rows,
    predicted: Predicted,
    mask: npt.NDArray[np.bool_],
) -> Score:
    part = Predicted(
        **{f: getattr(predicted, f)[mask] for f in ("median_us", "low_us", "high_us", "log_sd")}
    )
    return score(name, rows.take(mask), part, [r for r, m in zip(records, mask, strict=True) if m])


def published_scores(gpu: str, modes: Sequence[str]) -> list[Score]:
    """Leave one size out over all rank counts of these modes, one score per rank count."""
    all_records, all_rows = published(gpu)
    found = []
    for mode in modes:
        keep = np.array([f" {mode} " in f"{r.group} " and r.backend == "nccl" for r in all_records])
        records = [r for r, k in zip(all_records, keep, strict=True) if k]
        rows = all_rows.take(keep)
        sizes = np.array([str(r.size_bytes) for r in records])
        predicted = cross_validate(rows, sizes)
        for ranks in sorted({r.num_ranks for r in records}):
            mask = np.array([r.num_ranks == ranks for r in records])
            found.append(_subset(f"{gpu}, {mode}, {ranks} ranks", records, rows, predicted, mask))
    return found


def regime(record: Record) -> str:
    """Protocol and most channels of an H200 environment, as left out together."""
    env = dict(record.env)
    if env.get("NCCL_PROTO") == "LL128":
        return "LL128"
    channels = env.get("NCCL_MIN_NCHANNELS")
    return {"1": "1 channel", "16": "16 channels"}.get(channels or "", "seen elsewhere")


def h200_scores() -> tuple[Score, list[Score], list[LeftOut]]:
    """Graphed rows through host memory: pooled over environments whose protocol and channels occur
    elsewhere, each environment, and the regimes left out altogether."""
    all_records, all_rows = h200("shm-pcie5")
    records = [r for r in all_records if r.graphed]
    rows = all_rows.take(all_rows.graphed)
    groups = np.array([r.group for r in records])
    regimes = np.array([regime(r) for r in records])
    predicted = cross_validate(rows, groups)
    each = [
        _subset(g, records, rows, predicted, groups == g) for g in dict.fromkeys(groups.tolist())
    ]
    pooled = _subset("2 x H200 SHM, pooled", records, rows, predicted, regimes == "seen elsewhere")
    sizes = np.array([r.size_bytes for r in records])
    left = []
    for name in ("LL128", "1 channel", "16 channels"):
        mask = regimes == name
        fitted = fit_rows(rows.take(~mask))
        seen = rows.take(mask)
        mine = [r for r, m in zip(records, mask, strict=True) if m]
        probe = mask & (sizes == PROBE_BYTES)
        again = fit_rows(rows.take(~mask | probe))
        rest = mask & ~probe
        tested = rows.take(rest)
        left.append(
            LeftOut(
                name=name,
                score=score(name, seen, fitted.predict(seen.design, seen.graphed), mine),
                dominant=fitted.dominant(seen.design)[:4],
                unidentifiable=fitted.unidentifiable(seen.design),
                probed=score(
                    f"{name}, probed at {PROBE_BYTES} B",
                    tested,
                    again.predict(tested.design, tested.graphed),
                    [r for r, m in zip(records, rest, strict=True) if m],
                ),
            )
        )
    return pooled, each, left


def h200_interval_scores() -> dict[str, float]:
    """Eager and graphed rows, leave one environment out: coverage, width, interval scores.

    The naive interval of a row is the 5-95 % range of the training rows of its size.
    """
    records, rows = h200("shm-pcie5")
    groups = np.array([r.group for r in records])
    sizes = np.array([r.size_bytes for r in records])
    predicted = cross_validate(rows, groups)
    eager = ~rows.graphed
    low, high = np.zeros(len(rows)), np.zeros(len(rows))
    for i in range(len(rows)):
        train = rows.time_us[eager & (groups != groups[i]) & (sizes == sizes[i])]
        low[i], high[i] = np.quantile(train, (0.05, 0.95))
    wide = (predicted.high_us - predicted.low_us) / predicted.median_us
    covered = predicted.covers(rows.time_us)
    return {
        "eager_coverage": float(covered[eager].mean()),
        "eager_interval_score_us": interval_score(
            predicted.low_us[eager], predicted.high_us[eager], rows.time_us[eager]
        ),
        "eager_naive_interval_score_us": interval_score(
            low[eager], high[eager], rows.time_us[eager]
        ),
        "graphed_coverage": float(covered[~eager].mean()),
        "graphed_median_width": float(np.median(wide[~eager])),
    }


def report() -> dict[str, object]:
    """All figures of this file."""
    pooled, each, left = h200_scores()
    return {
        "published": [
            asdict(s)
            for gpu in (PRO, L40S)
            for s in published_scores(gpu, ("nccl", "sglang_graph", "sglang_eager"))
        ],
        "h200_pooled": asdict(pooled),
        "h200_environments": [asdict(s) for s in each],
        "h200_left_out": [asdict(s) for s in left],
        "h200_intervals": h200_interval_scores(),
    }


def _line(values: dict[str, object]) -> str:
    worst = ", ".join(f"{row} {error:+.0%}" for row, error in values["worst"])  # type: ignore[attr-defined]
    return (
        f"{values['name']!s:<62} n {values['rows']:>3}  MAPE {values['mape']:6.1%}  "
        f"max {values['max_ape']:6.1%}  90% covers {values['coverage90']:4.0%}  "
        f"width {values['median_width']:4.0%}  worst: {worst}"
    )


def main() -> None:
    """Print every figure, or all as JSON."""
    found = report()
    if "--json" in sys.argv[1:]:
        print(json.dumps(found))
        return
    for key in ("published", "h200_environments"):
        for values in found[key]:  # type: ignore[attr-defined]
            print(_line(values))
    print(_line(found["h200_pooled"]))  # type: ignore[arg-type]
    for values in found["h200_left_out"]:  # type: ignore[attr-defined]
        print(_line(values["score"]))
        told = ", ".join(f"{name} {share:.2f}" for name, share in values["dominant"])
        print(f"    told by the data (0) or the prior (1): {told}")
        print(f"    not identifiable: {', '.join(values['unidentifiable'])}")
        print("    " + _line(values["probed"]))
    print(found["h200_intervals"])


if __name__ == "__main__":
    main()
