"""What is said about a setting: effective, inert, not effective or unknown, with the evidence."""

from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.effect.by_size import SizeEffect

Verdict = Literal["effective", "inert", "not effective", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobVerdict:
    """One variable: what was asked, what NCCL read, and whether it could matter.

    ``evidence`` are "file:line" of what shows it. ``lost_at`` says where a value was lost, where
    that is known.
    """

    name: str
    asked: str | None
    read: str | None
    verdict: Verdict
    reason: str
    evidence: tuple[str, ...] = ()
    lost_at: str | None = None
    sizes: tuple[SizeEffect, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "asked": self.asked,
            "read": self.read,
            "verdict": self.verdict,
            "reason": self.reason,
            "evidence": list(self.evidence),
            "lost_at": self.lost_at,
            "sizes": [effect.to_json() for effect in self.sizes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Other settings of the same communicator, predicted against the present ones."""

    environment: dict[str, str]
    sizes: tuple[SizeEffect, ...]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "environment": self.environment,
            "text": self.text,
            "sizes": [effect.to_json() for effect in self.sizes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSummary:
    """One communicator as the log shows it; None where it does not say."""

    comm: str | None
    version: str | None
    num_ranks: int | None
    ranks_logged: tuple[int, ...]
    channels: int | None
    transport: str | None
    machine: str | None
    #: distinct choices of rank 0, "1024 B: RING/LL, 1 channel"
    choices: tuple[str, ...]
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            name: (list(value) if isinstance(value, tuple) else value)
            for name in self.__dataclass_fields__
            for value in (getattr(self, name),)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One process of a watched run: its environment by C ``getenv`` (what may matter of it), and
    the NCCL that it has loaded; None where it could not be read or none is loaded."""

    pid: int
    parent: int
    name: str
    environment: dict[str, str] | None
    nccl_library: str | None
    nccl_version: str | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Everything about one set of logs."""

    files: tuple[str, ...]
    num_lines: int
    versions: tuple[str, ...]
    comms: tuple[CommSummary, ...]
    knobs: tuple[KnobVerdict, ...]
    #: all asked variables together against none of them, by size
    together: tuple[SizeEffect, ...] = ()
    suggestions: tuple[Suggestion, ...] = ()
    #: processes of a watched run, the command first
    workers: tuple[WorkerView, ...] = ()
    #: warnings of NCCL and what a reader must know, one line each
    notes: tuple[str, ...] = field(default=())

    @property
    def num_not_effective(self) -> int:
        """Settings that were asked for and are not in force."""
        return sum(knob.verdict == "not effective" for knob in self.knobs)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "files": list(self.files),
            "lines": self.num_lines,
            "versions": list(self.versions),
            "communicators": [comm.to_json() for comm in self.comms],
            "knobs": [knob.to_json() for knob in self.knobs],
            "together": [effect.to_json() for effect in self.together],
            "suggestions": [suggestion.to_json() for suggestion in self.suggestions],
            "workers": [worker.to_json() for worker in self.workers],
            "notes": list(self.notes),
        }
