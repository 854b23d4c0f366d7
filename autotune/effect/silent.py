"""Variables that NCCL never prints: the log's own form shows some of them."""

import re
from pathlib import Path

from autotune.effect.absence import Absence
from autotune.effect.reads import workers
from autotune.nccl_log_types import NcclLog

_WORDY = ("INFO", "ABORT", "TRACE")


def unprinted(log: NcclLog, name: str, asked: str | None) -> Absence:
    """Verdict on a variable of ``reads.SILENT``."""
    if name == "NCCL_DEBUG" and asked is not None:
        return _level(log, asked)
    if name == "NCCL_DEBUG_SUBSYS" and asked is not None:
        return _subsystems(log, asked)
    if name == "NCCL_DEBUG_FILE" and asked is not None:
        return _file(log, asked)
    return Absence(
        verdict="unknown",
        reason="NCCL reads it and never prints it: look into the workers (`-- CMD --run`)",
    )


def _level(log: NcclLog, asked: str) -> Absence:
    talking = sum(process.informative for process in workers(log))
    if asked.upper() in _WORDY:
        if talking:
            return Absence(
                verdict="effective", reason=f"{talking} workers wrote lines of level INFO"
            )
        if log.processes or log.bare_version:
            return Absence(
                verdict="not effective",
                reason="the log holds a version or warnings only, no line of level INFO",
                lost_at="between the shell and the workers",
            )
        return Absence(verdict="unknown", reason="the log holds no line of NCCL's")
    if talking:
        return Absence(
            verdict="not effective",
            reason=f"{talking} workers wrote lines of level INFO, more than {asked} lets through",
            lost_at="between the shell and the workers",
        )
    return Absence(verdict="effective", reason=f"no line of a higher level than {asked}")


def _subsystems(log: NcclLog, asked: str) -> Absence:
    wanted = set(asked.upper().replace(" ", "").split(","))
    comms = [comm for process in workers(log) for comm in process.comms if comm.complete]
    shown = {
        "TUNING": any(comm.model for comm in comms) or any(p.choices for p in log.processes),
        "GRAPH": any(comm.graphs for comm in comms),
    }
    asked_of_these = [name for name in shown if name in wanted or "ALL" in wanted]
    if asked.startswith("^") or not asked_of_these or not comms:
        return Absence(verdict="unknown", reason="NCCL prints most of its lines without it as well")
    absent = [name for name in asked_of_these if not shown[name]]
    if absent:
        return Absence(
            verdict="not effective",
            reason=f"{len(comms)} communicators came up without a line of {', '.join(absent)}",
            lost_at="between the shell and the workers",
        )
    return Absence(
        verdict="effective", reason=f"lines of {', '.join(asked_of_these)} are in the log"
    )


def _file(log: NcclLog, asked: str) -> Absence:
    name = Path(asked).name
    pattern = re.escape(name).replace("%h", r"[\w.\-]+").replace("%p", r"\d+")
    fitting = [file for file in log.files if re.match(pattern, Path(file).name)]
    if fitting:
        return Absence(
            verdict="effective", reason=f"{len(fitting)} of the files bear that name", evidence=()
        )
    return Absence(verdict="unknown", reason="no file given here bears that name")
