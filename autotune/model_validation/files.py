"""Data files of ``autotune model validate``: their kind, found by content, and their columns.

Rows are read by ``model``; this file says early, in one line, what a file lacks, so that nobody
gets a message about the third function down. A kind is recognised with columns missing, too.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UserError
from model.allreduce.data import CSV_COLUMNS

#: kind -> columns that every row needs; a tuple inside means one of these
COLUMNS: Mapping[str, tuple[str | tuple[str, ...], ...]] = {
    "allreduce_csv": CSV_COLUMNS,
    "moe_csv": ("gpu", "kernel", "weight_dtype", "hidden", "intermediate", "experts", "top_k", "tp",
                "routing", "tokens", "time_us"),
    "acceptance_csv": ("target_model", "draft", "dataset", "temp", "steps", "topk",
                       "draft_tokens", "tau"),
    "allreduce_jsonl": ("env", "size_bytes", ("graph_us", "eager_us")),
    "step_jsonl": ("env", "link", "tokens", "layers", "hidden", "gemms", "small_kernels_per_layer",
                   "allreduce_bytes", "eager_us", "eager_no_allreduce_us", "graph_us",
                   "graph_no_allreduce_us"),
}  # fmt: skip
#: columns that tell kinds apart which share others
_OWN: Mapping[str, frozenset[str]] = {
    "allreduce_jsonl": frozenset({"size_bytes"}),
    "step_jsonl": frozenset({"gemms", "layers", "tokens", "allreduce_bytes"}),
}
#: a file is of the kind whose columns it holds best, if it holds this share of them
_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file, its kind and its rows as text values (CSV) or JSON objects."""

    path: Path
    kind: str
    #: (line number, values)
    rows: tuple[tuple[int, Mapping[str, object]], ...]


def read_data_file(path: Path) -> DataFile:
    """Read a file and find its kind.

    Raises ``UserError``: no such file, no kind known, a row that is no row, a column missing.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: this is no text in UTF-8") from None
    if not text.strip():
        raise UserError(f"{path} is empty")
    is_json = text.lstrip().startswith("{")
    rows = _json_rows(path, text) if is_json else _csv_rows(path, text)
    if not rows:
        raise UserError(f"{path} holds no rows")
    kind = _kind(path, is_json, rows)
    for line, row in rows:
        missing = next((c for c in COLUMNS[kind] if not _has(row, c)), None)
        if missing is not None:
            name = " or ".join(missing) if isinstance(missing, tuple) else missing
            where = f"{path} line {line}" if is_json else str(path)
            raise UserError(f"{where}: column {name!r} is missing ({kind} needs it)")
    return DataFile(path, kind, rows)


def _json_rows(path: Path, text: str) -> tuple[tuple[int, Mapping[str, object]], ...]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number}: no JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number}: an object is expected, got {line[:40]!r}")
        rows.append((number, row))
    return tuple(rows)


def _csv_rows(path: Path, text: str) -> tuple[tuple[int, Mapping[str, object]], ...]:
    reader = csv.reader(io.StringIO(text))
    header: Sequence[str] = [name.strip() for name in next(reader, [])]
    rows = []
    for values in reader:
        if not values:
            continue
        if len(values) != len(header):
            raise UserError(
                f"{path} line {reader.line_num}: {len(values)} values, but the header names "
                f"{len(header)} columns"
            )
        rows.append((reader.line_num, dict(zip(header, values, strict=True))))
    return tuple(rows)


def _kind(path: Path, is_json: bool, rows: Sequence[tuple[int, Mapping[str, object]]]) -> str:
    names = {str(name) for _, row in rows for name in row}
    shares = {}
    for kind, columns in COLUMNS.items():
        if kind.endswith("jsonl") != is_json:
            continue
        flat = [c for c in columns if _has(dict.fromkeys(names, 0), c)]
        others = [own for other, own in _OWN.items() if other != kind and kind in _OWN]
        foreign = any(len(own & names) * 2 > len(own) for own in others)
        shares[kind] = len(flat) / len(columns) - (0.5 if foreign else 0.0)
    best = max(shares, key=lambda kind: shares[kind])
    if shares[best] < _LEAST_SHARE:
        known = "; ".join(
            f"{kind}: {', '.join('|'.join(c) if isinstance(c, tuple) else c for c in columns)}"
            for kind, columns in COLUMNS.items()
            if kind in shares
        )
        raise UserError(f"{path}: no kind of data has these columns; known: {known}")
    return best


def _has(row: Mapping[str, object], column: str | tuple[str, ...]) -> bool:
    names = (column,) if isinstance(column, str) else column
    return any(name in row and row[name] is not None for name in names)
