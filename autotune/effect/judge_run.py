"""Joins what a watched run showed: NCCL's logs, and the environment of each process on the way.

The logs decide whether a setting is in force; the environments say where a lost one was lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.effect.judge import judge_log
from autotune.effect.launch import Launch
from autotune.effect.reads import same_value
from autotune.effect.verdicts import Judgement, KnobVerdict
from autotune.effect.watch import SeenProcess, Watched
from autotune.nccl_log import parse_nccl_logs
from model.machine import Machine


def judge_run(
    watched: Watched,
    launch: Launch,
    expected: Mapping[str, str],
    *,
    machine: Machine | None = None,
    sizes: Sequence[int] = (),
) -> Judgement:
    """Judge the asked variables by a run; without NCCL logs by the workers' environments."""
    wanted = {
        name: value
        for name, value in launch.asked.items()
        if name.startswith("NCCL_") and "DEBUG" not in name
    } | dict(expected)
    judgement = judge_log(parse_nccl_logs(watched.logs), wanted, machine=machine, sizes=sizes)
    knobs = tuple(_place(knob, watched.processes, launch) for knob in judgement.knobs)
    return replace(judgement, knobs=knobs, notes=(*judgement.notes, *_notes(watched, launch)))


def _place(knob: KnobVerdict, processes: Sequence[SeenProcess], launch: Launch) -> KnobVerdict:
    """Add where a value was lost, and judge by environments what no log tells."""
    if knob.asked is None or knob.verdict in ("effective", "inert"):
        return knob
    asked = knob.asked
    rows = [p for p in processes if p.environment is not None]
    if not rows:
        return knob
    having = {p.pid for p in rows if same_value(knob.name, asked, _value(p, knob.name))}
    without = [p for p in rows if p.pid not in having]
    root = processes[0].pid
    if root not in having and any(p.pid == root for p in rows):
        return replace(
            knob,
            verdict="not effective",
            lost_at="parent",
            reason=f"the command itself (pid {root}) has no {knob.name}={asked}",
        )
    broken = next((p for p in without if p.parent in having), None)
    if broken is None:
        if knob.verdict == "unknown":
            return replace(
                knob,
                reason=f"in the environment of all {len(rows)} processes seen, but no NCCL log "
                "shows whether it was used",
            )
        where = "inside the workers: their environment has it, NCCL did not use it"
        return replace(knob, lost_at=where)
    value = _value(broken, knob.name)
    how = launch.start_method if launch.start_method != "unknown" else _how(broken)
    lost = f"between pid {broken.parent} and pid {broken.pid} ({broken.name[:60]}), {how}"
    reason = f"{len(without)} of {len(rows)} processes lack {knob.name}={asked}"
    if value:
        reason = f"pid {broken.pid} has {knob.name}={value} instead of {asked}"
    return replace(knob, verdict="not effective", lost_at=lost, reason=f"{reason}; lost {lost}")


def _value(process: SeenProcess, name: str) -> str:
    return (process.environment or {}).get(name, "")


def _how(process: SeenProcess) -> str:
    for method in ("forkserver", "spawn"):
        if method in process.name:
            return method
    return "started with an environment of its own"


def _notes(watched: Watched, launch: Launch) -> list[str]:
    notes = ["way: " + " -> ".join(launch.steps), f"{len(watched.processes)} processes seen"]
    blank = [p for p in watched.processes if p.environment is None]
    if blank:
        notes.append(f"{len(blank)} processes show no environment in /proc")
    libraries = {p.nccl_library for p in watched.processes if p.nccl_library is not None}
    if len(libraries) > 1:
        notes.append(f"several NCCL libraries mapped: {', '.join(sorted(libraries))}")
    elif libraries:
        notes.append(f"mapped NCCL: {libraries.pop()}")
    if not watched.logs:
        notes.append(
            "no NCCL log was written: no communicator was made in this time (longer --run?)"
        )
    if watched.exit_code not in (None, 0):
        last = watched.output_tail.strip().splitlines()[-1:] or [""]
        notes.append(f"the command ended by itself with code {watched.exit_code}: {last[0][:160]}")
    return notes
