"""NCCL's variables by themselves: what NCCL reads out of them, and contradictions between them."""

import re
from collections.abc import Iterator

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.setup import Setup
from model.nccl.paths import PATH_RANK
from model.nccl.settings import ALGORITHMS, FUNCTIONS, PROTOCOLS, c_integer, parse_list

_LISTS = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}
_NUMBERS = (
    "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NTHREADS",
    "NCCL_LL128_NTHREADS", "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE",
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE",
)  # fmt: skip
_NCCL = "NVIDIA/nccl sources 2.27 to 2.30"


def _listed(setup: Setup, name: str) -> tuple[int, ...] | None:
    """On/off per element for an all-reduce; None where unset, wrong or not about it."""
    try:
        return parse_list(name, setup.env.get(name, ""), _LISTS[name])
    except ValueError:
        return None


def protocols(setup: Setup) -> tuple[bool, bool, bool]:
    """Which of LL, LL128, Simple the variables leave possible."""
    listed = _listed(setup, "NCCL_PROTO")
    on = (True, True, True) if listed is None else tuple(bool(value) for value in listed)
    return on[0], on[1], on[2]


def settled(setup: Setup) -> frozenset[str]:
    """Variables that the rules of this file already call inert or unread, without a machine."""
    names = {hit.subject.split("=")[0] for hit in buffer_of_another_protocol(setup)}
    if any(True for _ in unknown_level(setup)) or any(True for _ in level_without_p2p(setup)):
        names.add("NCCL_P2P_LEVEL")
    if "NCCL_NTHREADS" in setup.env and not _threads_valid(c_integer(setup.env["NCCL_NTHREADS"])):
        names.add("NCCL_NTHREADS")
    return frozenset(names)


def _threads_valid(threads: int) -> bool:
    return threads % 32 == 0 and 64 <= threads <= 512


@rule("nccl-list-invalid", _NCCL)
def refused_list(setup: Setup) -> Iterator[Hit]:
    """Words that NCCL refuses: the communicator is not made."""
    for name, elements in _LISTS.items():
        if name not in setup.env:
            continue
        try:
            parse_list(name, setup.env[name], elements)
        except ValueError as problem:
            yield error(
                f"{name}={setup.env[name]}",
                f"NCCL refuses it at start: {problem}",
                f"write a comma list of {', '.join(elements)}",
            )


@rule("nccl-algo-collective", "vllm-project/vllm#58179")
def one_collective_named(setup: Setup) -> Iterator[Hit]:
    """From 2.31 on, naming one collective in NCCL_ALGO leaves the others without an algorithm."""
    text = setup.env.get("NCCL_ALGO", "")
    entries = [entry for entry in text.split(";") if entry]
    prefixed = [entry for entry in entries if ":" in entry]
    named = {entry.split(":")[0].lower() for entry in prefixed}
    everything = {name.lower() for name in FUNCTIONS} <= named
    if not prefixed or len(prefixed) < len(entries) or everything:
        return
    if "NCCL_PROTO" not in setup.env or setup.nccl_before("2.31") is True:
        return
    known = setup.nccl_before("2.31") is False
    yield (error if known else warning)(
        f"NCCL_ALGO={text}",
        f"it names {', '.join(sorted(named))} only and NCCL_PROTO={setup.env['NCCL_PROTO']} is "
        "set: NCCL 2.31 and newer then have no algorithm for the other collectives (\"No "
        "algorithm/protocol available for function Broadcast\")"
        + ("" if known else "; the NCCL version is not known here"),
        f"write NCCL_ALGO='ring,tree;{prefixed[0].lower()}'",
    )  # fmt: skip


@rule("nccl-algo-unavailable", "nccl-pcie.md 1.1: NVLS and CollNet are off without NVLink switches")
def algorithm_of_other_hosts(setup: Setup) -> Iterator[Hit]:
    """NCCL_ALGO that leaves an all-reduce only algorithms which this host lacks."""
    listed = _listed(setup, "NCCL_ALGO")
    if listed is None or setup.nvlink or setup.tp == 1:
        return
    left = [name for name, on in zip(ALGORITHMS, listed, strict=True) if on]
    if left and not {"Tree", "Ring"} & set(left):
        known = setup.nvlink is False
        yield (error if known else warning)(
            f"NCCL_ALGO={setup.env['NCCL_ALGO']}",
            f"it leaves {', '.join(left)} for an all-reduce; one host without an NVLink switch has "
            "Ring and Tree only, so NCCL finds no algorithm and stops",
            "add Ring or Tree",
        )


@rule("nccl-no-transport", f"{_NCCL}: transports are P2P, SHM and NET")
def only_the_network_left(setup: Setup) -> Iterator[Hit]:
    """Peer-to-peer and host memory both off: GPUs of one host talk over the network."""
    off = [
        name
        for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
        if c_integer(setup.env.get(name, "0")) == 1
    ]
    if len(off) == 2:
        yield error(
            "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1",
            "neither peer-to-peer nor host memory is left: the GPUs of this host reduce over "
            "network sockets",
            "drop one of them",
        )


@rule("nccl-number", f"{_NCCL}: numbers go through C strtoll")
def odd_number(setup: Setup) -> Iterator[Hit]:
    """ "16MiB" is 16, "many" is 0, "0x10" is 16."""
    for name in _NUMBERS:
        text = setup.env.get(name)
        if text is None or re.fullmatch(r"\s*-?(0|[1-9]\d*)\s*", text):
            continue
        yield warning(
            f"{name}={text}",
            f"NCCL reads {c_integer(text)} out of it: digits only, no units",
            f"write the plain number, such as {name}=16777216",
        )


@rule("nccl-channels-contradict", f"{_NCCL}: the most is applied first, then the least")
def channel_limits_cross(setup: Setup) -> Iterator[Hit]:
    """MIN above MAX: the least wins."""
    pairs = (("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"), ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"))
    for low, high in pairs:
        least, most = (c_integer(setup.env.get(name, "0")) for name in (low, high))
        if low in setup.env and high in setup.env and least > most:
            winner = f"{least} channels" if low == "NCCL_MIN_NCHANNELS" else f"{most} CTAs"
            yield error(
                f"{low}={least} {high}={most}",
                f"the least is above the most: NCCL uses {winner} and the other value is lost",
                f"set {low} at most {most}, or drop one",
            )


@rule("nccl-p2p-level-unknown", f"{_NCCL}: levels are matched case-sensitively")
def unknown_level(setup: Setup) -> Iterator[Hit]:
    """A level that NCCL does not know is ignored without a word."""
    level = setup.env.get("NCCL_P2P_LEVEL")
    if level is None or level in PATH_RANK or level[:1].isdigit():
        return
    near = level.upper() if level.upper() in PATH_RANK else "SYS"
    yield error(
        f"NCCL_P2P_LEVEL={level}",
        "NCCL knows no such level and keeps its default (PXB: no peer-to-peer across a host "
        "bridge); the words are case-sensitive",
        f"write NCCL_P2P_LEVEL={near} (LOC NVL NVB C2C PIX PXB PHB SYS)",
    )


@rule("nccl-p2p-contradict", f"{_NCCL}: NCCL_P2P_DISABLE is looked at before the level")
def level_without_p2p(setup: Setup) -> Iterator[Hit]:
    """A level while peer-to-peer is off."""
    level, off = setup.env.get("NCCL_P2P_LEVEL"), setup.env.get("NCCL_P2P_DISABLE")
    if level is not None and off is not None and c_integer(off) == 1:
        yield warning(
            f"NCCL_P2P_LEVEL={level} NCCL_P2P_DISABLE={off}",
            "inert: with peer-to-peer off NCCL never looks at the level; all traffic goes through "
            "host memory (SHM)",
            "drop one of them",
        )


@rule("nccl-ll128-forced", "NVIDIA/nccl#281; local-inference-lab/rtx6kpro communicators 2026-05-07")
def ll128_on_pcie(setup: Setup) -> Iterator[Hit]:
    """Any list sets LL128 on or off for good; on PCIe NCCL itself keeps it off.

    "^LL" and "^Simple" turn it on as "LL128" does. It needs 128-byte stores to arrive whole.
    """
    listed = _listed(setup, "NCCL_PROTO")
    if listed is None or listed[1] != 1 or setup.nvlink or setup.tp == 1:
        return
    text = setup.env["NCCL_PROTO"]
    how = "names LL128" if "ll128" in text.lower().replace("^ll128", "") else "turns LL128 on"
    if setup.machine is None:
        where = "unless all GPUs are joined by NVLink, NCCL itself keeps it off"
    else:
        where = (
            f"the GPUs of {setup.machine.name} are joined by "
            f"{'/'.join(sorted(setup.path_types)) or 'PCIe'} paths, where NCCL keeps it off"
        )
    yield warning(
        f"NCCL_PROTO={text}",
        f"it {how} and skips NCCL's own safety test; {where}, since a 128-byte store that PCIe "
        "splits corrupts data. It can be faster (measured +12 % at concurrency 32 on 8 RTX PRO "
        "6000), never by luck alone",
        "keep it only with an output check against the baseline; NCCL_PROTO=LL,Simple is safe",
    )  # fmt: skip


@rule("nccl-buffsize-inert", f"{_NCCL}: NCCL_BUFFSIZE sizes the Simple protocol only")
def buffer_of_another_protocol(setup: Setup) -> Iterator[Hit]:
    """A buffer size for a protocol that is off."""
    ll, ll128, simple = protocols(setup)
    for name, used, protocol in (
        ("NCCL_BUFFSIZE", simple, "Simple"),
        ("NCCL_LL_BUFFSIZE", ll, "LL"),
        ("NCCL_LL128_BUFFSIZE", ll128, "LL128"),
    ):
        if name in setup.env and not used:
            yield warning(
                f"{name}={setup.env[name]}",
                f"inert: it sizes the buffers of {protocol}, and "
                f"NCCL_PROTO={setup.env['NCCL_PROTO']} leaves {protocol} off",
                "drop it",
            )


@rule("nccl-threads", f"{_NCCL}: 64 to 512 (LL128: 160 to 640), multiples of 32")
def thread_count(setup: Setup) -> Iterator[Hit]:
    """Counts that NCCL corrects, and the default written out."""
    text = setup.env.get("NCCL_NTHREADS")
    if text is None:
        return
    threads = c_integer(text)
    ll, _, simple = protocols(setup)
    if not _threads_valid(threads):
        yield warning(
            f"NCCL_NTHREADS={text}",
            f"{threads} is no multiple of 32 between 64 and 512: NCCL warns and takes another "
            "value",
            "write 64, 128, 256 or 512",
        )
    elif threads == 512 and setup.nccl_effects is None:
        simple_note = (
            "; a ring of Simple on slow links (12 GB/s or less) takes 256" if simple else ""
        )
        yield info(
            f"NCCL_NTHREADS={text}",
            f"512 is already the most and NCCL's default{simple_note}; small messages run fewer "
            "threads whatever this says" if ll or simple else "inert: LL128 has its own variable",
            "drop it",
        )  # fmt: skip


@rule("nccl-max-channels-cap", f"{_NCCL}; servers.md C.5")
def a_cap_is_no_request(setup: Setup) -> Iterator[Hit]:
    """MAX_NCHANNELS never raises the count; with a machine the count itself is judged."""
    text = setup.env.get("NCCL_MAX_NCHANNELS")
    if text is None or setup.machine is not None:
        return
    if c_integer(setup.env.get("NCCL_MIN_NCHANNELS", "0")) >= c_integer(text) > 0:
        return
    if c_integer(text) >= 8:
        yield info(
            f"NCCL_MAX_NCHANNELS={text}",
            "a cap, not a request: inert unless NCCL has more channels by itself (PCIe boxes have "
            "2 to 4, 2 x H200 over NVLink 24)",
            "look at \"N coll channels\" in NCCL's log; NCCL_MIN_NCHANNELS raises the count",
        )  # fmt: skip


@rule("nccl-debug-file", "sgl-project/sglang#3810; NCCL opens the file with mode w")
def shared_debug_file(setup: Setup) -> Iterator[Hit]:
    """One file for all ranks, or none at all."""
    level = setup.env.get("NCCL_DEBUG", "").upper()
    path = setup.env.get("NCCL_DEBUG_FILE")
    if path is not None and "%p" not in path and setup.tp != 1:
        yield error(
            f"NCCL_DEBUG_FILE={path}",
            "without %p every rank truncates and writes the same file: the log of all but one is "
            "lost or torn",
            "write NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log",
        )
    if path is not None and level not in ("INFO", "TRACE", "WARN", "VERSION"):
        yield warning(
            f"NCCL_DEBUG_FILE={path}",
            "inert: NCCL_DEBUG is not set, so nothing is logged",
            "add NCCL_DEBUG=INFO",
        )
    if path is None and level in ("INFO", "TRACE"):
        yield warning(
            f"NCCL_DEBUG={level}",
            "the workers' lines go to whatever their standard output is, mixed or nowhere to be "
            "seen",
            "add NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log and read one file per worker pid",
        )


@rule(
    "nccl-debug-subsys", "NVIDIA/nccl#1444: the choice of each call is in TUNING (2.24 and newer)"
)
def debug_without_tuning(setup: Setup) -> Iterator[Hit]:
    """A log that cannot show what it is made for."""
    level = setup.env.get("NCCL_DEBUG", "").upper()
    given = setup.env.get("NCCL_DEBUG_SUBSYS", "")
    parts = {part.strip().upper() for part in given.split(",") if part.strip()}
    missing = [name for name in ("INIT", "ENV", "GRAPH", "TUNING") if name not in parts]
    if level in ("INFO", "TRACE") and missing and "ALL" not in parts and not given.startswith("^"):
        yield info(
            f"NCCL_DEBUG_SUBSYS={given}" if given else "NCCL_DEBUG_SUBSYS",
            f"{', '.join(missing)} not among the subsystems (default INIT,ENV): the log will not "
            "show algorithm, protocol and channels per message size",
            "NCCL_DEBUG_SUBSYS=INIT,ENV,GRAPH,TUNING",
        )
