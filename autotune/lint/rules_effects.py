"""Predicted effects of NCCL's variables on a machine: none, harm, or a change worth measuring."""

from collections.abc import Iterator

from autotune.lint.findings import Hit, info, rule, warning
from autotune.lint.nccl_effects import Effects, across_releases
from autotune.lint.rules_nccl import settled
from autotune.lint.setup import Setup
from model.nccl.settings import c_integer


@rule("nccl-inert", "servers.md C.5; rtx6kpro communicators 2026-05-07; the H200 recordings")
def no_effect_here(setup: Setup) -> Iterator[Hit]:
    """Variables without which NCCL would do the very same at every size of decoding."""
    found = setup.nccl_effects
    if found is None:
        return
    names = [
        name
        for name, effects in found.by_name.items()
        if name not in settled(setup)
        and all(effect.outcome == "inert" for effect in found.decoding(effects))
    ]
    if not names:
        return
    from autotune.digits import size_text

    decoding = found.decoding(found.by_name[names[0]])
    first, last = decoding[0], decoding[-1]
    runs = first.present if last.present == first.present else f"{first.present} ... {last.present}"
    clauses = [clause for name in names if (clause := _why(found, name))]
    why = f": {'; '.join(clauses)}" if clauses else ""
    prefill = [name for name in names if found.by_name[name][-1].outcome != "inert"]
    later = f". A prefill chunk differs by {', '.join(prefill)}, see below" if prefill else ""
    yield warning(
        ", ".join(f"{name}={setup.env[name]}" for name in names),
        f"inert on {_host(setup)}: without {_amount(found, names)} NCCL runs the same kernels from "
        f"{size_text(first.size_bytes)} to {size_text(last.size_bytes)} ({runs}){why}{later}",
        f"drop {'it' if len(names) == 1 else 'them'}: no difference in decoding comes from there",
    )


def _amount(found: Effects, names: list[str]) -> str:
    """Whether the variables are inert one at a time only, or all together."""
    if len(names) == 1:
        return "it"
    try:
        together = found.decoding(found.without(names))
    except ValueError:
        return "any one of these"
    if all(effect.outcome == "inert" for effect in together):
        return "any or all of these"
    return "any one of these (not all at once)"


def _why(found: Effects, name: str) -> str | None:
    """The particular reason of one variable, with its number."""
    value = found.env[name]
    effects = found.decoding(found.by_name[name])
    kernels = {effect.present.split(",")[0] for effect in effects}
    if name in ("NCCL_ALGO", "NCCL_PROTO"):
        part = 0 if name == "NCCL_ALGO" else 1
        own = sorted({kernel.split("/")[part] for kernel in kernels if "/" in kernel})
        return f"{'/'.join(own)} is NCCL's own choice" if own else None
    if name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"):
        channels = found.channels_without(name)
        if channels <= c_integer(value):
            return f"{name}={value} only caps, and there are {channels} channels"
        return f"messages of these sizes use fewer channels than {value}"
    if name in ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS"):
        channels = found.channels_without(name)
        if channels >= c_integer(value):
            return f"there are {channels} channels without {name}={value}"
        return f"messages of these sizes use no more than the {channels} channels there are"
    if name == "NCCL_NTHREADS":
        return f"{'512 threads are' if c_integer(value) == 512 else value + ' gives'} NCCL's own"
    if name == "NCCL_BUFFSIZE":
        if any("/Simple" in kernel for kernel in kernels):
            return f"NCCL_BUFFSIZE={value} is NCCL's own"
        return "NCCL_BUFFSIZE is Simple's, which none of these sizes runs"
    if name in ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        from model.nccl.settings import NcclSettings

        transport = found.scene.selector(NcclSettings.from_env(found.env)).comm.transport
        return f"the transport is {transport} without {name} as well"
    return None


@rule("nccl-harms", "the H200 recordings: forced LL made a 64-token step 33 % slower")
def harm_at_some_sizes(setup: Setup) -> Iterator[Hit]:
    """A variable that is predicted to cost time at sizes in use."""
    found = setup.nccl_effects
    for name, effects in () if found is None else found.by_name.items():
        outcomes = {effect.outcome for effect in effects}
        if outcomes & {"harms", "fails"}:
            from autotune.effect.ranges import sizes_in_words

            by_size = "set it by size with a tuner file (NCCL_TUNER_CONFIG_FILE)"
            yield warning(
                f"{name}={setup.env[name]}",
                f"predicted on {_host(setup)}: {sizes_in_words(effects)}",
                f"it helps small messages only: {by_size}" if "helps" in outcomes else "drop it",
            )


@rule("nccl-changes", "the selector and the all-reduce model (model/nccl, model/allreduce)")
def helps_or_unclear(setup: Setup) -> Iterator[Hit]:
    """A variable that changes what NCCL runs, and is not predicted to cost anything."""
    found = setup.nccl_effects
    for name, effects in () if found is None else found.by_name.items():
        outcomes = {effect.outcome for effect in effects}
        if outcomes & {"helps", "unclear"} and not outcomes & {"harms", "fails"}:
            from autotune.effect.ranges import sizes_in_words

            yield info(
                f"{name}={setup.env[name]}",
                f"predicted on {_host(setup)}: {sizes_in_words(effects)}",
                "measure it: `autotune probe` needs no model",
            )


@rule("nccl-release-unknown", "NVIDIA/nccl sources 2.27 to 2.30: what these releases agree on")
def bounded_by_known_releases(setup: Setup) -> Iterator[Hit]:
    """Variables under a release whose tables are not known: what all known releases say of them."""
    bounded = across_releases(setup)
    if bounded is None:
        return
    releases, outcomes = bounded
    kinds: dict[str, list[str]] = {}
    for name, seen in outcomes.items():
        if seen == {"inert"}:
            kind = "changes nothing in decoding in any of them"
        elif "inert" in seen:
            kind = "is inert at some sizes or releases and not at others"
        else:
            kind = "changes what NCCL runs in every one of them"
        kinds.setdefault(kind, []).append(f"{name}={setup.env[name]}")
    says = "; ".join(f"{', '.join(names)} {kind}" for kind, names in kinds.items())
    version = setup.nccl_version
    if version is None and setup.machine is not None:
        version = setup.machine.software.nccl_version
    yield info(
        f"NCCL {version}",
        f"the choices of this release are not known, so no effect is predicted for it. By releases "
        f"{releases[0]} to {releases[-1]} on {_host(setup)}: {says}",
        "`autotune env check` on its NCCL log tells what it chose; or install a known release",
    )


def _host(setup: Setup) -> str:
    return setup.machine.name if setup.machine is not None else ""
