"""All-reduce data files: published tables (CSV) and probe rows (JSONL) as rows for a fit.

CSV: ``gpu,software,mode,num_gpus,size_bytes,time_us``; mode is nccl (nccl-tests, the GPU's time),
``*_graph`` or ``*_eager``. JSONL: ``env`` (NCCL variables), ``size_bytes``, ``eager_us`` and/or
``graph_us``, ``link``, optional ``num_ranks`` and ``backend``. Bad rows are refused with file and
line.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.allreduce.calibrate import Rows
from model.allreduce.design import Design
from model.allreduce.model import allreduce_design
from model.machine import Machine
from model.nccl.settings import NcclSettings

CSV_COLUMNS = ("gpu", "software", "mode", "num_gpus", "size_bytes", "time_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measured all-reduce of a data file. ``group`` names its environment or table."""

    group: str
    gpu: str | None
    backend: str
    env: tuple[tuple[str, str], ...]
    nccl_version: str | None
    num_ranks: int
    size_bytes: int
    graphed: bool
    time_us: float
    #: how the traffic went, as the file names it ("nvlink", "shm-pcie5"), None without
    link: str | None = None


def read_records(path: str | Path) -> list[Record]:
    """All rows of a CSV or JSONL file; raises ``ValueError`` naming file, line and value."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"all-reduce data {path}: {error.strerror}") from None
    # by content: a table under another name is still a table
    reader = _read_jsonl if text.lstrip().startswith("{") or path.suffix == ".jsonl" else _read_csv
    records = list(reader(path, text))
    if not records:
        raise ValueError(f"all-reduce data {path}: no rows")
    return records


def build_rows(machine: Machine, records: Sequence[Record]) -> Rows:
    """Records measured on ``machine`` as rows for ``fit_rows``, in order."""
    designs: list[Design] = []
    for record in records:
        designs.append(
            allreduce_design(
                machine,
                record.num_ranks,
                record.backend,
                NcclSettings.from_env(dict(record.env)),
                record.nccl_version,
                [record.size_bytes],
            )
        )
    return Rows(
        design=Design.concat(designs),
        time_us=np.array([record.time_us for record in records]),
        graphed=np.array([record.graphed for record in records]),
    )


def _read_csv(path: Path, text: str) -> Iterator[Record]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in CSV_COLUMNS if name not in (reader.fieldnames or [])]
    if missing:
        raise ValueError(f"all-reduce data {path}: column {missing[0]!r} is missing")
    for row in reader:
        where = f"all-reduce data {path} line {reader.line_num}"
        mode, software = row["mode"] or "", row["software"] or ""
        num_ranks = _whole(where, "num_gpus", row["num_gpus"], 2)
        version = re.search(r"nccl (\d+\.\d+\.\d+)", software)
        # frameworks run their own one-shot kernel on two GPUs and NCCL on more without NVLink
        direct = mode != "nccl" and num_ranks == 2
        yield Record(
            group=f"{row['gpu']} {software} {mode} {num_ranks}",
            gpu=row["gpu"],
            backend="one_shot" if direct else "nccl",
            env=(),
            nccl_version=version.group(1) if version else None,
            num_ranks=num_ranks,
            size_bytes=_whole(where, "size_bytes", row["size_bytes"], 1),
            graphed=not mode.endswith("eager"),
            time_us=_time(where, "time_us", row["time_us"]),
        )


def _read_jsonl(path: Path, text: str) -> Iterator[Record]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"all-reduce data {path} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: no JSON: {error.msg}") from None
        if not isinstance(row, Mapping) or not isinstance(row.get("env"), Mapping):
            raise ValueError(f"{where}: an object with 'env' (NCCL variables) is expected")
        env = tuple(sorted((str(k), str(v)) for k, v in row["env"].items()))
        group = " ".join(f"{k.removeprefix('NCCL_')}={v}" for k, v in env)
        timed = [(key, key == "graph_us") for key in ("graph_us", "eager_us") if row.get(key)]
        if not timed:
            raise ValueError(f"{where}: neither graph_us nor eager_us (us) is given")
        for key, graphed in timed:
            yield Record(
                group=f"{row.get('link', '')} {group}".strip(),
                gpu=None,
                backend=str(row.get("backend", "nccl")),
                env=env,
                nccl_version=row.get("nccl_version"),
                num_ranks=_whole(where, "num_ranks", row.get("num_ranks", 2), 2),
                size_bytes=_whole(where, "size_bytes", row.get("size_bytes"), 1),
                graphed=graphed,
                time_us=_time(where, key, row[key]),
                link=None if row.get("link") is None else str(row["link"]),
            )


def _whole(where: str, field: str, value: object, least: int) -> int:
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not (number >= least and number.is_integer()):
        unit = "bytes" if field == "size_bytes" else "ranks"
        raise ValueError(f"{where}: {field} {value!r} must be a whole number of {unit} >= {least}")
    return int(number)


def _time(where: str, field: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"{where}: {field} {value!r} must be a time > 0 us")
    if number > 60e6:
        raise ValueError(f"{where}: {field} {value!r} us is above a minute; the unit is us")
    return number
