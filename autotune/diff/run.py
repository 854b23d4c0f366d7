"""One side of a diff: facts by group, measured series by load, and what nobody recorded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.explain.subject import StudyContext
from autotune.foreign.run import Definition
from model.spec import Knobs, Scalar, Workload

Group = Literal[
    "code",
    "packages",
    "driver",
    "hardware state",
    "environment",
    "configuration",
    "workload",
]
GROUPS: tuple[Group, ...] = (
    "code",
    "packages",
    "driver",
    "hardware state",
    "environment",
    "configuration",
    "workload",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Repeats of one run at one load, in the order taken. ``concurrency`` None: not told."""

    concurrency: int | None
    #: how ``tokens_per_s`` was taken
    definition: Definition | None
    tokens_per_s: tuple[float, ...] = ()
    tpot_ms: tuple[float, ...] = ()
    cycle_ms: tuple[float, ...] = ()
    accept_length: tuple[float, ...] = ()
    terms_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trial, an exported file or a foreign run."""

    label: str
    #: what it is: "trial", "best-config YAML" or the format of a foreign file
    kind: str
    facts: Mapping[Group, Mapping[str, str]]
    #: group (or "group.key") -> why nothing is known
    unknown: Mapping[str, str]
    series: tuple[Series, ...]
    #: settings by dotted name, as far as they are known
    knobs: Mapping[str, Scalar | None]
    #: load, context and lengths, as far as they are known
    workload: Mapping[str, Scalar | None]
    #: NCCL_* variables of the workers
    nccl_environment: Mapping[str, str] = field(default_factory=dict)
    full_workload: Workload | None = None
    context: StudyContext | None = None
    #: A/A difference of its study by concurrency, as a fraction
    noise_floors: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def levels(self) -> tuple[int | None, ...]:
        """Loads it was measured at."""
        return tuple(series.concurrency for series in self.series)

    def at(self, concurrency: int | None) -> Series | None:
        """The series of a load."""
        return next((s for s in self.series if s.concurrency == concurrency), None)

    @property
    def eager(self) -> bool | None:
        """Whether the main forward runs without a CUDA graph; None when unknown."""
        method = self.knobs.get("speculation.method")
        verify, decode = self.knobs.get("cuda_graph.verify"), self.knobs.get("cuda_graph.decode")
        captured = verify if method == "eagle3" else decode if method == "off" else None
        return None if captured is None else not captured

    def full_knobs(self, rest: Mapping[str, Scalar | None]) -> Knobs | None:
        """Its knobs with what it does not tell taken from ``rest``; None when impossible."""
        if self.knobs.get("speculation.steps") and "speculation.method" not in self.knobs:
            # it speculates, with a method that nobody named
            return None
        values = {**rest, **self.knobs}
        if not values.get("speculation.method"):
            return None
        try:
            return Knobs.of(values)
        except (ValueError, TypeError, AssertionError):
            return None
