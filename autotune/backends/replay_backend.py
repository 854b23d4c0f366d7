"""Serves measurements that were taken before: exact knobs only, nothing interpolated.

Lets a study run again, or another search design be compared, without the machine. Repeats come in
the recorded order; when they run out, one of them is drawn again and says so in its notes.
"""

from collections import defaultdict
from pathlib import Path
from typing import Self

from pydantic import StrictStr, ValidationError, model_validator

from autotune.backends.base import (
    UNPLACED,
    BackendContext,
    Group,
    failed_measurement,
    over_memory,
    require_open,
)
from autotune.backends.recording import Recorded, read_recording
from autotune.backends.recording_store import recording_of_study
from autotune.backends.sim_noise import stream
from autotune.errors import UserError
from autotune.provenance import collect_provenance
from autotune.records import Failure, Measurement, Provenance
from autotune.schemas import Schema
from model.spec import Knobs, Workload

#: fields that make two workloads the same load; the prompts' text is only noted, because built-in
#: prompts differ between Python versions and a replay reads none
_LOAD_FIELDS = ("input_len", "output_len", "temperature", "ignore_eos")


class ReplayArgs(Schema):
    """``backend.args`` of ``replay``."""

    #: a file of measurements (JSON lines); relative paths start at the study file
    path: Path | None = None
    #: or a SQLAlchemy URL and the study in it
    database: StrictStr | None = None
    study: StrictStr | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.database is None):
            raise ValueError("give either path or database")
        if (self.database is None) != (self.study is None):
            raise ValueError("database and study go together")
        return self


class ReplayBackend:
    """A recording as a backend."""

    name = "replay"

    def __init__(self, context: BackendContext) -> None:
        """Raises ``UserError`` for a missing or broken file."""
        try:
            args = ReplayArgs.model_validate(context.study.backend.args)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(("backend.args", *(str(part) for part in first["loc"])))
            raise UserError(
                f"{field}: {first['msg'].removeprefix('Value error, ')}; replay takes "
                "{path: FILE.jsonl} or {database: URL, study: NAME}"
            ) from None
        if args.path is not None:
            path = context.study_dir / args.path.expanduser()
            self._source, self._recording = path.name, read_recording(path)
        else:
            assert args.database is not None
            assert args.study is not None
            self._source = f"study {args.study}"
            self._recording = recording_of_study(args.database, args.study)
        self._seed = context.study.seed
        self._constraints = context.study.constraints
        self._by_load: dict[tuple[str, int], list[Recorded]] = defaultdict(list)
        for recorded in self._recording.repeats:
            key = (recorded.knobs.id, recorded.workload.concurrency)
            self._by_load[key].append(recorded)
        self._group: Group | None = None

    def group(self, knobs: Knobs) -> Group:
        """One group: a file needs no restart."""
        return Group.of({})

    def open(self, group: Group) -> None:
        """Nothing to start."""
        self._group = group

    def measure(self, knobs: Knobs, workload: Workload, repeat: int) -> Measurement:
        """The recorded repeat number ``repeat`` (from 0), or a redrawn one."""
        require_open(self, self._group, knobs)
        found = self._by_load.get((knobs.id, workload.concurrency), [])
        same_load = [recorded for recorded in found if _same_load(recorded.workload, workload)]
        if not same_load:
            return self._unknown(knobs, workload, repeat, found)
        notes: tuple[str, ...] = ()
        if repeat < len(same_load):
            chosen = same_load[repeat]
        else:
            draws = stream(self._seed, "replay", knobs.id, workload.concurrency, repeat)
            chosen = same_load[int(draws.integers(len(same_load)))]
            notes = (
                f"resampled: repeat {repeat} was asked for, {len(same_load)} are recorded; "
                f"this is repeat {chosen.measurement.repeat} again",
            )
        if chosen.workload.prompts_sha256 != workload.prompts_sha256:
            notes = (*notes, "recorded on other prompts than this study's")
        placed = {"trial": UNPLACED, "order": UNPLACED, "repeat": repeat}
        found_then = chosen.measurement
        failure = found_then.failure or self._refused(found_then)
        changes = placed | {"notes": found_then.notes + notes, "failure": failure}
        return found_then.model_copy(update=changes)

    def _refused(self, found: Measurement) -> Failure | None:
        """Why this study's constraints, not the recorded one's, let a repeat not count."""
        if found.output_check == "incorrect" and self._constraints.lossless:
            reason = next((n for n in found.notes if n.startswith("output: ")), "output: incorrect")
            return Failure(kind="incorrect", stage="check", message=reason.removeprefix("output: "))
        return over_memory(found.memory_gib, self._constraints.max_memory_gib)

    def provenance(self) -> Provenance:
        """The recording's own provenance; without one, this host's with the reason."""
        if self._recording.provenance is not None:
            return self._recording.provenance
        reason = "replayed from a file that recorded no provenance"
        unknown = dict.fromkeys(("ranks", "machine_fingerprint"), reason)
        return collect_provenance(
            {"backend": self.name, "source": self._source}, device="none", unknown=unknown
        )

    def close(self) -> None:
        """Nothing was started."""
        self._group = None

    def _unknown(
        self, knobs: Knobs, workload: Workload, repeat: int, same_knobs: list[Recorded]
    ) -> Measurement:
        if same_knobs:
            recorded = same_knobs[0].workload
            differ = [
                f"{field} {getattr(recorded, field)} (asked {getattr(workload, field)})"
                for field in _LOAD_FIELDS
                if getattr(recorded, field) != getattr(workload, field)
            ]
            message = f"these knobs were recorded with {', '.join(differ)}"
        else:
            message = f"not recorded in {self._source}; {self._nearest(knobs, workload)}"
        failure = Failure(kind="invalid", stage="measure", message=message)
        now = self._recording.repeats[-1].measurement.ended
        return failed_measurement(knobs, workload, repeat, failure, started=now, ended=now)

    def _nearest(self, knobs: Knobs, workload: Workload) -> str:
        """Names the recorded knobs with the fewest and smallest differences."""
        same_level = [
            r for r in self._recording.repeats if r.workload.concurrency == workload.concurrency
        ]
        levels = sorted({r.workload.concurrency for r in self._recording.repeats})
        if not same_level:
            return f"recorded concurrency: {', '.join(map(str, levels))}"
        best = min(same_level, key=lambda recorded: _distance(knobs, recorded.knobs)).knobs
        mine, theirs = knobs.values(), best.values()
        differ = [
            f"{name} {theirs.get(name)} (asked {mine.get(name)})"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        if not differ:
            return f"these knobs are recorded at concurrency {', '.join(map(str, levels))}"
        return f"the nearest recorded knobs {best.id} have {', '.join(differ)}"


def _same_load(recorded: Workload, asked: Workload) -> bool:
    return all(getattr(recorded, field) == getattr(asked, field) for field in _LOAD_FIELDS)


def _distance(left: Knobs, right: Knobs) -> tuple[int, float, str]:
    """(number of differing knobs, summed relative difference of the numbers, id for ties)."""
    mine, theirs = left.values(), right.values()
    differing = [n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n)]
    size = 0.0
    for name in differing:
        a, b = mine.get(name), theirs.get(name)
        if isinstance(a, int | float) and isinstance(b, int | float):
            size += abs(a - b) / max(abs(a), abs(b), 1)
        else:
            size += 1.0
    return len(differing), size, right.id
