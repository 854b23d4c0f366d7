"""Why a variable cannot matter here, in one sentence with the numbers of the log."""

from collections.abc import Mapping, Sequence

from autotune.digits import size_text
from autotune.effect.by_size import Scene, SizeEffect
from autotune.nccl_log_types import CommLog
from model.nccl.settings import PROTOCOLS, NcclSettings, c_integer, parse_list


def inert_reason(
    comm: CommLog,
    environment: Mapping[str, str],
    name: str,
    scene: Scene | None,
    effects: Sequence[SizeEffect],
) -> str | None:
    """The particular reason, or None where there is only the general one (or none at all)."""
    value = environment.get(name, "")
    if name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"):
        return _cap(comm, environment, name, value, scene)
    if name in ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS"):
        if effects:
            return _floor(comm, environment, name, value, scene, effects)
        return _already_above(comm, value)
    if name == "NCCL_BUFFSIZE":
        return _buffer(environment, effects)
    if name == "NCCL_NTHREADS" and not effects:
        return _default_threads(comm, value)
    if name == "NCCL_NTHREADS":
        return _threads_reason(value, effects)
    if name == "NCCL_P2P_LEVEL" and (denied := _no_peer_access(comm, value)) is not None:
        return denied
    if name == "NCCL_P2P_LEVEL" and effects:
        return (
            f"the ranks reach each other by {comm.transport} with NCCL's default level as well, so "
            "the transport stays as it is"
        )
    if name == "NCCL_P2P_DISABLE" and effects:
        ring = comm.graph(4)
        path = None if ring is None else ring.type_intra
        why = f": the GPUs are {path} apart, beyond NCCL's own level"
        if path not in ("PHB", "SYS"):
            why = ""
        return f"the transport is {comm.transport} with peer-to-peer allowed as well{why}"
    if name == "NCCL_NVLS_ENABLE":
        return _nvls(comm, value)
    return None


def _cap(
    comm: CommLog, environment: Mapping[str, str], name: str, value: str, scene: Scene | None
) -> str | None:
    channels = comm.coll_channels
    if channels is None:
        return None
    cap = c_integer(value)
    floor = c_integer(environment.get("NCCL_MIN_NCHANNELS", "0"))
    if floor >= cap > 0:
        return f"NCCL_MIN_NCHANNELS={floor} sets the {channels} channels; the cap adds nothing"
    if channels < cap or _without(scene, environment, name) == channels:
        than = f"below {cap}" if channels < cap else "no more"
        return f"only a cap: NCCL has {channels} channels by itself, {than}"
    return None


def _already_above(comm: CommLog, value: str) -> str | None:
    """Without a selector: channels beyond the minimum were not made by it."""
    channels = comm.coll_channels
    if channels is None or channels <= c_integer(value):
        return None
    return f"NCCL has {channels} channels, more than the {c_integer(value)} asked for at least"


def _threads_reason(value: str, effects: Sequence[SizeEffect]) -> str:
    asked = c_integer(value)
    if asked % 32 or not 64 <= asked <= _THREADS:
        why = "is no multiple of 32" if asked % 32 else f"is not between 64 and {_THREADS}"
        return f"NCCL refuses {value}, which {why}, and runs the same threads without it"
    most = max((_threads(effect) for effect in effects), default=0)
    return (
        f"NCCL takes the same threads without {value}: up to {most} here ({_THREADS} are its "
        "default and most; Simple adds a warp), and small messages run fewer whatever is set"
    )


#: default and most of the Simple and LL protocols, in every release
_THREADS = 512
#: up to this ring bandwidth (GB/s) Ring/Simple runs 256 threads by default
_SLOW_RING = 12.0


def _default_threads(comm: CommLog, value: str) -> str | None:
    ring = comm.graph(4)
    if c_integer(value) != _THREADS or ring is None:
        return None
    if ring.num_channels * ring.bw_intra <= _SLOW_RING:
        return None
    return f"{_THREADS} threads are NCCL's default and most for the Simple and LL protocols"


def _no_peer_access(comm: CommLog, value: str) -> str | None:
    """A level that lets all paths of a host use peer-to-peer, while nothing does."""
    farthest = value == "SYS" or (value[:1].isdigit() and c_integer(value) >= 4)
    if not farthest or comm.transport != "SHM":
        return None
    return (
        f"NCCL_P2P_LEVEL={value} lets every path of the host use peer-to-peer, and still all "
        f"{len(comm.transports)} logged connections are SHM: the driver gives no peer access "
        "between these GPUs"
    )


def _floor(
    comm: CommLog,
    environment: Mapping[str, str],
    name: str,
    value: str,
    scene: Scene | None,
    effects: Sequence[SizeEffect],
) -> str | None:
    without = _without(scene, environment, name)
    if without is None:
        return None
    if without >= c_integer(value):
        return f"NCCL has {without} channels without it, at least {c_integer(value)}"
    largest = size_text(max(effect.size_bytes for effect in effects))
    return (
        f"it raises the channels from {without} to {comm.coll_channels}, but messages up to "
        f"{largest} use no more of them"
    )


def _buffer(environment: Mapping[str, str], effects: Sequence[SizeEffect]) -> str | None:
    try:
        listed = parse_list("NCCL_PROTO", environment.get("NCCL_PROTO", ""), PROTOCOLS)
    except ValueError:
        # another verdict says that NCCL refuses the list
        return None
    if listed is not None and not listed[2]:
        return (
            "it sizes the buffers of the Simple protocol only, and "
            f"NCCL_PROTO={environment['NCCL_PROTO']} leaves Simple off"
        )
    if effects and not any("/Simple" in effect.present for effect in effects):
        return (
            f"it sizes the buffers of the Simple protocol only, and none of the {len(effects)} "
            "sizes here runs Simple"
        )
    return None


def _nvls(comm: CommLog, value: str) -> str | None:
    if comm.transport in ("SHM", "mixed", "NET"):
        return f"NVLS needs NVLink peer-to-peer; the transport here is {comm.transport}"
    if comm.topology and not any("NVS" in line for line in comm.topology):
        return "NVLS needs an NVLink switch; NCCL's topology shows none"
    if c_integer(value) != 0 and comm.nvls_channels == 0:
        return "NCCL found no NVLS channels although it may use them"
    return None


def _threads(effect: SizeEffect) -> int:
    words = effect.present.split()
    return int(words[words.index("x") + 1]) if "x" in words else 0


def _without(scene: Scene | None, environment: Mapping[str, str], name: str) -> int | None:
    """Channels that NCCL has without the variable."""
    if scene is None:
        return None
    rest = {key: text for key, text in environment.items() if key != name}
    return scene.selector(NcclSettings.from_env(rest)).comm.num_channels
