"""Settings that the model expects to beat the present ones at the sizes in use."""

import math
from collections.abc import Iterator, Mapping, Sequence

from autotune.effect.by_size import Scene, SizeEffect
from autotune.effect.ranges import sizes_in_words
from autotune.effect.verdicts import Suggestion
from model.nccl.settings import NcclSettings

#: tried on top of the present settings and on NCCL's own; LL128 is left out: unsafe on PCIe
_TRIED: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_MIN_NCHANNELS": "8"},
    {"NCCL_MIN_NCHANNELS": "16"},
    {"NCCL_MIN_NCHANNELS": "32"},
    {"NCCL_PROTO": "LL"},
    {"NCCL_PROTO": "LL,Simple"},
    {"NCCL_PROTO": "Simple"},
)
_SHOWN = 3


def suggestions(
    scene: Scene,
    environment: Mapping[str, str],
    sizes: Sequence[int],
    host_variables: Sequence[str],
) -> tuple[Suggestion, ...]:
    """Best first: predicted to help at some size and to harm at none; empty without times."""
    if scene.machine is None:
        return ()
    ours = NcclSettings.from_env(environment)
    found: dict[tuple[str, ...], tuple[float, Suggestion]] = {}
    for candidate in _candidates(environment, host_variables):
        try:
            effects = scene.compare(NcclSettings.from_env(candidate), ours, sizes)
        except ValueError:
            continue
        outcomes = {effect.outcome for effect in effects}
        if "helps" not in outcomes or outcomes & {"harms", "fails"}:
            continue
        gain = sum(math.log(effect.ratio[0]) for effect in effects if effect.ratio)
        key = tuple(effect.present for effect in effects)
        text = f"{_shown(candidate, environment, host_variables)}: {sizes_in_words(effects)}"
        offer = Suggestion(environment=dict(candidate), sizes=effects, text=text)
        # of settings that run the same kernels the one with the fewest variables is kept
        if key not in found or len(candidate) < len(found[key][1].environment):
            found[key] = gain, offer
    ranked = sorted(found.values(), key=lambda pair: pair[0])
    return tuple(offer for _, offer in ranked[:_SHOWN])


def _candidates(
    environment: Mapping[str, str], host_variables: Sequence[str]
) -> Iterator[dict[str, str]]:
    host = {name: environment[name] for name in host_variables if name in environment}
    for change in _TRIED:
        yield {**host, **change}
        if change:
            yield {**environment, **change}


def _shown(
    candidate: Mapping[str, str], environment: Mapping[str, str], host_variables: Sequence[str]
) -> str:
    added = [f"{n}={v}" for n, v in candidate.items() if environment.get(n) != v]
    dropped = [n for n in environment if n not in candidate and n.startswith("NCCL_")]
    parts = [" ".join(added)] if added else []
    if dropped:
        parts.append(f"without {', '.join(dropped)}")
    return " ".join(parts) or "the present settings"


def gains(effects: Sequence[SizeEffect]) -> list[int]:
    """Sizes at which a change is predicted to help."""
    return [effect.size_bytes for effect in effects if effect.outcome == "helps"]
