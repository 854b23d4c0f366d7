"""NCCL's environment variables as NCCL itself reads them: what each text really sets.

Numbers go through C ``strtoll`` with base 0, so "16MiB" is 16 and "many" is 0. NCCL_ALGO and
NCCL_PROTO are lists such as ``ring,tree``, ``^LL`` or ``allreduce:tree;broadcast:ring``; a list
sets *every* element to on or off, so ``^LL`` forces LL128 on. Source: NVIDIA/nccl 2.27 to 2.30,
src/graph/tuning.cc, paths.cc, src/misc/param.cc (read, facts only).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from model.nccl.paths import OLD_LEVELS, PATH_RANK, SYS
from model.nccl.versions import MAX_CHANNELS
from model.spec import Knobs

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
#: an element of a list that nobody named: NCCL decides by the topology
DECIDE = 2

#: variables that hand the choice to a file or a library, which the selector does not read
UNMODELLED = (
    "NCCL_TUNER_PLUGIN",
    "NCCL_TUNER_CONFIG_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_HOSTID",
)


def c_integer(text: str) -> int:
    """The number C ``strtoll(text, NULL, 0)`` reads: leading digits, 0x and 0 prefixes, else 0."""
    match = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*)", text)
    if match is None:
        return 0
    sign, digits = match.groups()
    base = 16 if digits[:2].lower() == "0x" else 8 if digits.startswith("0") else 10
    value = int(digits, base)
    return -value if sign == "-" else value


def parse_list(
    name: str, text: str, elements: tuple[str, ...], function: str = "AllReduce"
) -> tuple[int, ...] | None:
    """On (1) or off (0) of each element for one collective, or None if the list leaves it alone.

    Raises ``ValueError`` where NCCL itself refuses: an unknown word, or a later entry without
    the name of a collective.
    """
    result: tuple[int, ...] | None = None
    for index, entry in enumerate(part for part in text.split(";") if part):
        words = [part for part in entry.split(":") if part]
        if not words:
            continue
        if len(words) == 1:
            if index > 0:
                raise ValueError(
                    f"{name}={text}: only the first entry may lack a collective; write "
                    f"'allreduce:{entry}'"
                )
            prefix, body = None, words[0]
        else:
            prefix, body = words[0], words[1]
            if prefix.lower() not in (f.lower() for f in FUNCTIONS):
                raise ValueError(
                    f"{name}={text}: {prefix!r} is no collective; known: {', '.join(FUNCTIONS)}"
                )
        inverted = body.startswith("^")
        named = [word for word in body.removeprefix("^").split(",") if word]
        lower = [element.lower() for element in elements]
        for word in named:
            if word.lower() not in lower:
                raise ValueError(
                    f"{name}={text}: {word!r} is unknown; known: {', '.join(elements)}"
                )
        if prefix is None or prefix.lower() == function.lower():
            chosen = {lower.index(word.lower()) for word in named}
            result = tuple(int((i in chosen) != inverted) for i in range(len(elements)))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSettings:
    """The NCCL environment of a communicator; None where a variable is not set.

    Texts stay as given; the properties say what NCCL makes of them.
    """

    algo: str | None = None
    proto: str | None = None
    min_channels: int | None = None
    max_channels: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    nthreads: int | None = None
    ll128_nthreads: int | None = None
    buffsize_bytes: int | None = None
    thread_thresholds: str | None = None
    p2p_level: str | None = None
    p2p_disable: bool = False
    shm_disable: bool = False
    nvls_enable: int | None = None
    #: set variables whose effect the selector does not know
    unmodelled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.enabled_algorithms()
        self.enabled_protocols()

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """From environment variables; others than NCCL_* are ignored.

        Raises ``ValueError`` where NCCL would refuse to start (NCCL_ALGO, NCCL_PROTO).
        """

        def number(*names: str) -> int | None:
            found = [c_integer(env[name]) for name in names if name in env]
            return found[-1] if found else None

        return cls(
            algo=env.get("NCCL_ALGO"),
            proto=env.get("NCCL_PROTO"),
            min_channels=number("NCCL_MIN_NRINGS", "NCCL_MIN_NCHANNELS"),
            max_channels=number("NCCL_MAX_NRINGS", "NCCL_MAX_NCHANNELS"),
            min_ctas=number("NCCL_MIN_CTAS"),
            max_ctas=number("NCCL_MAX_CTAS"),
            nthreads=number("NCCL_NTHREADS"),
            ll128_nthreads=number("NCCL_LL128_NTHREADS"),
            buffsize_bytes=number("NCCL_BUFFSIZE"),
            thread_thresholds=env.get("NCCL_THREAD_THRESHOLDS"),
            p2p_level=env.get("NCCL_P2P_LEVEL"),
            p2p_disable=number("NCCL_P2P_DISABLE") == 1,
            shm_disable=number("NCCL_SHM_DISABLE") == 1,
            nvls_enable=number("NCCL_NVLS_ENABLE"),
            unmodelled=tuple(name for name in UNMODELLED if env.get(name)),
        )

    @classmethod
    def from_knobs(cls, knobs: Knobs) -> Self:
        """From the NCCL knobs of a study; "auto" leaves NCCL's own choice."""

        def text(value: str) -> str | None:
            return None if value == "auto" else value

        return cls(
            algo=text(knobs.nccl_algo),
            proto=text(knobs.nccl_proto),
            min_channels=knobs.nccl_min_channels,
            max_channels=knobs.nccl_max_channels,
            nthreads=knobs.nccl_nthreads,
            buffsize_bytes=knobs.nccl_buffsize_bytes,
            p2p_level=text(knobs.nccl_p2p_level),
        )

    def to_env(self) -> dict[str, str]:
        """The variables to set for these settings; unmodelled ones are not part of it."""
        values: dict[str, str | int | None] = {
            "NCCL_ALGO": self.algo,
            "NCCL_PROTO": self.proto,
            "NCCL_MIN_NCHANNELS": self.min_channels,
            "NCCL_MAX_NCHANNELS": self.max_channels,
            "NCCL_MIN_CTAS": self.min_ctas,
            "NCCL_MAX_CTAS": self.max_ctas,
            "NCCL_NTHREADS": self.nthreads,
            "NCCL_LL128_NTHREADS": self.ll128_nthreads,
            "NCCL_BUFFSIZE": self.buffsize_bytes,
            "NCCL_THREAD_THRESHOLDS": self.thread_thresholds,
            "NCCL_P2P_LEVEL": self.p2p_level,
            "NCCL_P2P_DISABLE": 1 if self.p2p_disable else None,
            "NCCL_SHM_DISABLE": 1 if self.shm_disable else None,
            "NCCL_NVLS_ENABLE": self.nvls_enable,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def enabled_algorithms(self) -> tuple[int, ...]:
        """1 or 0 for each of ``ALGORITHMS`` in an all-reduce, before the topology's own rules."""
        listed = None if self.algo is None else parse_list("NCCL_ALGO", self.algo, ALGORITHMS)
        return (1,) * len(ALGORITHMS) if listed is None else listed

    def enabled_protocols(self) -> tuple[int, ...]:
        """1, 0 or ``DECIDE`` (LL128 that nobody named) for each of ``PROTOCOLS``."""
        listed = None if self.proto is None else parse_list("NCCL_PROTO", self.proto, PROTOCOLS)
        return (1, DECIDE, 1) if listed is None else listed

    def p2p_rank(self) -> int | None:
        """Farthest path (rank in ``PATH_TYPES``) on which P2P may run; None: NCCL's default."""
        if self.p2p_disable:
            return PATH_RANK["LOC"]
        level = self.p2p_level
        if level is None:
            return None
        if PATH_RANK.get(level, SYS + 1) <= SYS:
            return PATH_RANK[level]
        if level[:1].isdigit():
            return PATH_RANK[OLD_LEVELS[min(c_integer(level), len(OLD_LEVELS) - 1)]]
        # an unknown word: NCCL ignores it silently
        return None

    def channel_limits(self) -> tuple[int, int]:
        """Least and most channels after all variables: the most is applied first."""
        most = MAX_CHANNELS if self.max_channels is None else max(1, self.max_channels)
        least = 0 if self.min_channels is None else max(0, self.min_channels)
        max_ctas = self.max_ctas if self.max_ctas is not None and self.max_ctas > 0 else None
        min_ctas = self.min_ctas if self.min_ctas is not None and self.min_ctas > 0 else None
        cap = MAX_CHANNELS if max_ctas is None else min(max_ctas, MAX_CHANNELS)
        floor = min(1 if min_ctas is None else min(min_ctas, MAX_CHANNELS), cap)
        return min(max(least, floor), MAX_CHANNELS), min(most, cap, MAX_CHANNELS)
