"""A file of recorded measurements: JSON lines that the ``replay`` backend serves.

Each line is one object with a ``kind``: ``provenance`` (where the numbers come from; at most one)
or ``measurement`` (a repeat with the knobs and the workload it belongs to).
"""

import dataclasses
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.errors import UserError
from autotune.records import Measurement, Provenance
from model.spec import Knobs, Workload


@dataclass(frozen=True, slots=True)
class Recorded:
    """One repeat and what it measured."""

    knobs: Knobs
    workload: Workload
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Recording:
    """All repeats of a file, in its order."""

    repeats: tuple[Recorded, ...]
    provenance: Provenance | None = None


def write_recording(path: Path, recording: Recording) -> None:
    """Write ``recording`` as JSON lines; ``read_recording(path) == recording`` afterwards."""
    lines = []
    if recording.provenance is not None:
        provenance = recording.provenance.model_dump(mode="json")
        lines.append({"kind": "provenance", "provenance": provenance})
    lines.extend(recorded_line(recorded) for recorded in recording.repeats)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def read_recording(path: Path) -> Recording:
    """Read a file of ``write_recording``.

    Raises ``UserError`` naming the file, the line and what is wrong with it.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise UserError(
            f"recording {path}: {reason}; backend.args.path needs measurements as JSON lines"
        ) from None
    return parse_recording(text.splitlines(), str(path))


def parse_recording(lines: Iterable[str], name: str) -> Recording:
    """Parse the lines of a recording called ``name``; raises ``UserError`` as above."""
    repeats: list[Recorded] = []
    provenance = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if values["kind"] == "provenance":
                provenance = Provenance.model_validate(values["provenance"])
            elif values["kind"] == "measurement":
                repeats.append(_recorded(values))
            else:
                raise ValueError(f"kind {values['kind']!r} is neither measurement nor provenance")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"recording {name}, line {number}: {_reason(error)}") from None
    if not repeats:
        raise UserError(f"recording {name}: holds no measurement; record one first")
    return Recording(tuple(repeats), provenance)


def recorded_line(recorded: Recorded) -> dict[str, Any]:
    """The line of one repeat, for a file that is written as repeats are taken."""
    return {
        "kind": "measurement",
        "knobs": recorded.knobs.values(),
        "workload": dataclasses.asdict(recorded.workload),
        "measurement": recorded.measurement.model_dump(mode="json"),
    }


def portable(value: Any, places: Mapping[str, str]) -> Any:
    """``value`` (plain JSON) without paths of the machine: each folder in ``places`` by its name.

    The name "" makes what lies below a folder relative to it. A folder inside another one wins.
    """
    if isinstance(value, dict):
        return {key: portable(each, places) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [portable(each, places) for each in value]
    if not isinstance(value, str):
        return value
    for folder in sorted(places, key=len, reverse=True):
        if folder.strip("/"):
            name = places[folder].replace("\\", r"\\")
            # not the beginning of a longer name, nor the middle of a longer path
            at = rf"(?<![\w./-]){re.escape(folder.rstrip('/'))}"
            value = re.sub(f"{at}/", f"{name}/" if name else "", value)
            value = re.sub(rf"{at}(?![\w.-])", name or ".", value)
    return value


def _recorded(values: dict[str, Any]) -> Recorded:
    knobs = Knobs.of(values["knobs"])
    measurement = Measurement.model_validate(values["measurement"])
    if measurement.knobs_id != knobs.id:
        raise ValueError(
            f"the measurement belongs to knobs {measurement.knobs_id}, the line lists {knobs.id}"
        )
    workload = Workload(**values["workload"])
    if workload.concurrency != measurement.concurrency:
        raise ValueError(
            f"the measurement has concurrency {measurement.concurrency}, "
            f"its workload {workload.concurrency}"
        )
    return Recorded(knobs, workload, measurement)


def _reason(error: Exception) -> str:
    """The first problem in one line."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        return f"{field}: {first['msg']} (got {str(first['input'])[:60]!r})"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg} at column {error.colno})"
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing"
    return str(error)
