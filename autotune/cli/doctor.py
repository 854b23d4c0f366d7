"""``autotune doctor``: what is wrong with this host, and how to put it right."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autotune.cli.common import JsonOption, print_json, stdout
from autotune.screen import PROSE_WIDTH

if TYPE_CHECKING:
    from rich.text import Text

    from autotune.doctor.diagnose import Diagnosis
    from autotune.doctor.findings import Finding

_STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "unknown": "magenta",
    "info": "cyan",
    "ok": "green",
}


def doctor(
    from_folder: Path | None = typer.Option(
        None, "--from", metavar="FOLDER", help="Read recorded outputs instead of this host."
    ),
    save: Path | None = typer.Option(
        None, "--save", metavar="FOLDER", help="Also write what was read, for --from elsewhere."
    ),
    as_json: JsonOption = False,
) -> None:
    """Check packages, GPUs and the host faults that cost people days.

    Exit code 1 when an error is found; run as root, or lspci hides ACS and link states.
    """
    from autotune.doctor.diagnose import diagnose
    from autotune.doctor.sources import read_folder, record_host

    recording = record_host() if from_folder is None else read_folder(from_folder)
    if save is not None:
        recording.save(save)
        print(f"recorded {len(recording.texts)} files in {save}", file=sys.stderr)
    diagnosis = diagnose(recording)
    if as_json:
        print_json(diagnosis.to_json())
    else:
        _print(diagnosis)
    if diagnosis.has_errors:
        raise typer.Exit(1)


def _print(diagnosis: "Diagnosis") -> None:
    from rich.table import Table
    from rich.text import Text

    from autotune.doctor.findings import SEVERITIES, count

    console = stdout(PROSE_WIDTH)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding, subjects in _grouped(diagnosis.findings):
        table.add_row(
            Text(finding.severity.upper(), _STYLES[finding.severity]), _text(finding, subjects)
        )
    console.print(table)
    counts = count(list(diagnosis.findings))
    shown = ", ".join(f"{counts[name]} {name}" for name in SEVERITIES if counts[name])
    console.print(f"\n{diagnosis.origin}: {shown}")
    if counts["unknown"]:
        console.print("unknown is not fine: those checks had no evidence")


def _grouped(findings: "tuple[Finding, ...]") -> "list[tuple[Finding, list[str]]]":
    """Findings that differ in their subject only, as one."""
    found: dict[tuple[str, str, str, str], tuple[Finding, list[str]]] = {}
    for finding in findings:
        key = (finding.id, finding.severity, finding.reason, finding.fix)
        found.setdefault(key, (finding, []))[1].append(finding.subject)
    return list(found.values())


def _text(finding: "Finding", subjects: list[str]) -> "Text":
    from rich.text import Text

    text = Text()
    text.append(", ".join(subjects), "bold")
    text.append(f" [{finding.id}] ", "dim")
    text.append(finding.reason)
    if finding.fix:
        text.append("\n  fix: ", "bold")
        text.append(finding.fix)
    return text
