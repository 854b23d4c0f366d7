"""NVIDIA's measured all-reduce tables as a file that ``autotune model validate --fit`` reads."""

import csv
from pathlib import Path

from autotune.errors import UserError
from model.allreduce.data import CSV_COLUMNS, Record
from model.allreduce.nvidia_tables import read_nvidia_tables


def write_nvidia_tables(system: str, output: Path, root: Path | None = None) -> int:
    """Write the rows of one system as CSV and return how many.

    Raises ``UserError`` when the package is absent, the system unknown or the file unwritable.
    """
    try:
        records = read_nvidia_tables(system, root)
    except ValueError as error:
        raise UserError(str(error)) from None
    if not records:
        raise UserError(f"the tables of {system} hold no 16-bit all-reduce rows")
    try:
        with open(output, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(CSV_COLUMNS)
            writer.writerows(_row(record) for record in records)
    except OSError as error:
        raise UserError(f"{output}: {error.strerror}") from None
    return len(records)


def _row(record: Record) -> tuple[object, ...]:
    # the group is "<gpu> <software> <version> <mode> <ranks>"
    *_, software, version, mode, _ = record.group.split(" ")
    return (
        record.gpu,
        f"{software} {version}",
        mode,
        record.num_ranks,
        record.size_bytes,
        f"{record.time_us:.6g}",
    )
