"""What travels between the parent and its workers, pickled; no torch on either side of it."""

from dataclasses import dataclass

from engine.errors import ErrorKind
from engine.results import Request


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a worker. ``config_json`` is a whole ``LaunchConfig``."""

    config_json: str
    rank: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Rank 0 tells the port it serves; the parent passes it on (0: none is needed)."""

    port: int


@dataclass(frozen=True, slots=True)
class Generate:
    """Run requests; ``speculation_json`` is a ``SpeculationConfig``."""

    requests: tuple[Request, ...]
    speculation_json: str
    concurrency: int
    margins: bool
    timed: bool


@dataclass(frozen=True, slots=True)
class Environment:
    """Report the environment seen through C getenv."""


@dataclass(frozen=True, slots=True)
class AllreduceBench:
    """Time all-reduces of these sizes."""

    sizes_bytes: tuple[int, ...]
    repeats: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the worker."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker is alive and getting on."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A command is done; ranks other than 0 mostly answer None."""

    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """A command failed. ``fatal``: the worker ends; ``secondary``: a peer is the likely cause."""

    kind: ErrorKind
    stage: str
    message: str
    fatal: bool
    secondary: bool
