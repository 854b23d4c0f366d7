"""All-reduce rows from NVIDIA's measured tables in an installed ``aiconfigurator-core`` (optional).

Its ``message_size`` counts elements and its ``latency`` is in ms; rows here are bytes and us.
Nothing of the package is copied or imported: its Parquet files are read where they lie.
"""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

from model.allreduce.data import Record

#: bytes of an element, by the tables' words
ELEMENT_BYTES = {"half": 2, "bfloat16": 2, "float16": 2, "int8": 1, "float": 4, "float32": 4}
_INSTALL = "install it with: pip install 'autotune-moe[nvidia-tables]'"


def read_nvidia_tables(system: str, root: Path | None = None) -> list[Record]:
    """All-reduce rows of one system ("rtx_pro_6000_server", "l40s", ...), 16-bit types.

    ``root`` is the package's folder, by default where Python finds it. Raises ``ValueError`` when
    the package is missing or has no such system.
    """
    base = (_package_root() if root is None else root) / "systems" / "data"
    if not (base / system / "comm").is_dir():
        known = sorted(path.parent.name for path in base.glob("*/comm"))
        raise ValueError(f"no all-reduce tables of system {system!r}; known: {', '.join(known)}")
    files = sorted((base / system / "comm").glob("*/*/*_perf.parquet"))
    records: list[Record] = []
    for path in files:
        if path.name in ("nccl_perf.parquet", "custom_allreduce_perf.parquet"):
            records += records_of(_parquet_rows(path), f"{path.parts[-3]} {path.parts[-2]}")
    return records


def records_of(rows: Iterable[Mapping[str, object]], software: str) -> list[Record]:
    """Rows of one table as records: all-reduce of 16-bit elements, elements to bytes, ms to us."""
    found = []
    for row in rows:
        kind = str(row.get("nccl_dtype") or row.get("allreduce_dtype"))
        if row.get("op_name") != "all_reduce" or ELEMENT_BYTES.get(kind) != 2:
            continue
        mode = str(row.get("backend") or row.get("kernel_source", "")).lower()
        num_ranks = int(str(row["num_gpus"]))
        # frameworks run their own one-shot kernel on two GPUs and NCCL on more without NVLink
        direct = mode != "nccl" and num_ranks == 2
        found.append(
            Record(
                group=f"{row.get('device')} {software} {mode} {num_ranks}",
                gpu=str(row.get("device")),
                backend="one_shot" if direct else "nccl",
                env=(),
                nccl_version=software.split()[1] if mode == "nccl" else None,
                num_ranks=num_ranks,
                size_bytes=int(str(row["message_size"])) * ELEMENT_BYTES[kind],
                graphed=not mode.endswith("eager"),
                time_us=float(str(row["latency"])) * 1e3,
            )
        )
    return found


def _package_root() -> Path:
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"aiconfigurator-core is not installed; {_INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def _parquet_rows(path: Path) -> list[dict[str, object]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ValueError(f"{path} needs pyarrow, which comes with the extra; {_INSTALL}") from None
    rows: list[dict[str, object]] = parquet.read_table(path).to_pylist()
    return rows
