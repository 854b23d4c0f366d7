"""Whether the NCCL settings of the best configurations took effect, from a stored provenance.

Three witnesses, the strongest first: the choices that NCCL logged by size, the environment read
inside each worker, and the model, which knows where a setting cannot matter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.digits import size_text
from autotune.launch import nccl_environment
from autotune.records import Provenance
from model.nccl.settings import ALGORITHMS, PROTOCOLS, parse_list
from model.spec import Knobs


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting that the best knobs ask for, and whether it took effect."""

    name: str
    asked: str
    #: value in the workers, or why it is not known
    found: str
    #: effective, inert, not effective or unknown
    verdict: str
    reason: str


#: one logged choice: message bytes, algorithm, protocol
Choice = tuple[int, str, str]


def judged_settings(
    winners: Sequence[tuple[Knobs, Mapping[str, str]]], provenance: Provenance | None
) -> tuple[Setting, ...]:
    """NCCL settings of the winners, each with what is inert there (knob -> reason)."""
    found: dict[str, Setting] = {}
    for knobs, inert in winners:
        for name, asked in nccl_environment(knobs).items():
            if name not in found:
                found[name] = _setting(name, asked, knobs, inert, provenance)
    return tuple(found.values())


def _setting(
    name: str,
    asked: str,
    knobs: Knobs,
    inert: Mapping[str, str],
    provenance: Provenance | None,
) -> Setting:
    ranks = () if provenance is None else provenance.ranks
    if not ranks:
        why = "not read" if provenance is None else provenance.unknown.get("ranks", "not read")
        found, verdict, reason = why, "unknown", "no worker's environment was read"
    else:
        values = {rank.environment.get(name) for rank in ranks}
        found = ", ".join(sorted(str(value) for value in values))
        if values == {asked}:
            verdict, reason = "effective", f"read in all {len(ranks)} workers"
        else:
            verdict, reason = "not effective", f"asked for {asked}"
    if verdict != "not effective":
        ran = () if provenance is None else logged_choices(provenance)
        verdict, reason = _by_choices(name, asked, ran, (verdict, reason))
    knob = _knob_of(name, knobs)
    if knob in inert and verdict != "not effective":
        verdict, reason = "inert", inert[knob]
    return Setting(name=name, asked=asked, found=found, verdict=verdict, reason=reason)


def _knob_of(variable: str, knobs: Knobs) -> str:
    """The knob behind an NCCL variable: ``NCCL_MIN_NCHANNELS`` is ``nccl.min_channels``."""
    bare = variable.removeprefix("NCCL_").lower().replace("nchannels", "channels")
    name = f"nccl.{bare}"
    return name if name in knobs.values() else variable


def logged_choices(provenance: Provenance) -> tuple[Choice, ...]:
    """AllReduce choices that NCCL logged, by size; empty where the log was not kept."""
    rows = provenance.nccl.get("allreduce_choices")
    found = set()
    for row in rows if isinstance(rows, list | tuple) else ():
        # symmetric-memory kernels are outside NCCL_ALGO and NCCL_PROTO
        if row["algo"] != "SYMMETRIC":
            found.add((int(row["bytes"]), str(row["algo"]), str(row["proto"])))
    return tuple(sorted(found))


def _by_choices(
    name: str, asked: str, ran: Sequence[Choice], otherwise: tuple[str, str]
) -> tuple[str, str]:
    """Verdict and reason by what ran: a choice that the asked list forbids denies the setting."""
    elements = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}.get(name)
    if elements is None or not ran:
        return otherwise
    try:
        listed = parse_list(name, asked, elements)
    except ValueError as error:
        return "not effective", f"NCCL refuses it: {error}"
    if listed is None:
        return otherwise
    allowed = {e.lower() for e, on in zip(elements, listed, strict=True) if on}
    for size, algo, proto in ran:
        used = algo if name == "NCCL_ALGO" else proto
        if used.lower().replace("_", "") not in allowed:
            return (
                "not effective",
                f"NCCL's log: {algo}/{proto} ran at {size_text(size)}, which {name}={asked} "
                f"forbids",
            )
    shown = ", ".join(f"{algo}/{proto} at {size_text(size)}" for size, algo, proto in ran[:4])
    more = f" and {len(ran) - 4} sizes more" if len(ran) > 4 else ""
    return "effective", f"NCCL's log: {shown}{more}"
