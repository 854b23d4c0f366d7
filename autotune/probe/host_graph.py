"""The topology graph of this host from /sys and ``nvidia-smi topo -m``; needs no root.

/sys/bus/pci/devices/<address> is a link into the tree of bridges, so that a GPU's real path names
every port above it: root port, then (uplink, port) of each switch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.doctor.lspci import LinkRate, generation
from autotune.doctor.topo import TopoMatrix
from model.topology import PCIE_LANE_GB_PER_S

PCI_DEVICES = Path("/sys/bus/pci/devices")
_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
#: share of the signalling rate that bulk copies reach: 55 of 63 GB/s on Gen5 x16 (rtx6kpro notes)
_REACHED = 0.873
#: one-way shares of a hop, us: measured by flag ping-pong on Gen5 boxes (rtx6kpro notes)
_SWITCH_PORT_US, _UPLINK_US, _ROOT_PORT_US, _FABRIC_US = 0.34, 0.15, 0.33, 0.05
_SOCKET_US, _MEMORY_US, _NVLINK_US = 0.15, 0.1, 0.25
#: between sockets nothing is measured; what NCCL counts lies between 10 and 40 GB/s
_SOCKET_GB_PER_S = 45.0
#: GB/s of one NVLink as NCCL counts it, by compute capability (its topo.h)
_NVLINK_GB_PER_S: tuple[tuple[int, float], ...] = (
    (100, 40.1),
    (90, 20.6),
    (86, 12.0),
    (70, 20.0),
    (60, 18.0),
)
#: links of one GPU; more than these to all others together means an NVSwitch
_MOST_NVLINKS = 18


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """Where a GPU sits: ports above it from the root port down, its node, its link."""

    ports: tuple[str, ...]
    numa_node: int
    link: LinkRate
    #: link of each switch's uplink, by address
    uplinks: Mapping[str, LinkRate] = field(default_factory=dict)
    #: measured host copy, GB/s per direction; None before it is measured
    copy_gb_per_s: float | None = None


def place_of(address: str, devices: Path = PCI_DEVICES) -> GpuPlace:
    """Read a GPU's place. Raises ``ValueError`` when /sys does not have the device or its link."""
    device = devices / address
    if not device.exists():
        raise ValueError(f"{device} is not there: /sys does not show this GPU")
    chain = [part for part in device.resolve().parts if _ADDRESS.match(part)][:-1]
    above = devices / chain[-1] if chain else None
    own, port = _link(device, "max"), _link(above, "max") if above else None
    now = _link(device, "current")
    if own is None:
        raise ValueError(f"{device}/max_link_speed can't be read: the GPU's link is hidden")
    # an idle GPU lowers its generation, never its width
    width = now.width if now is not None and now.width else own.width
    ends = [end for end in (own, port) if end is not None]
    link = LinkRate(min(end.gen for end in ends), min(width, *(end.width for end in ends)))
    uplinks = {}
    for uplink in chain[1::2]:
        rate = _link(devices / uplink, "current")
        if rate is not None:
            uplinks[uplink] = rate
    node = _read(device / "numa_node") or "-1"
    return GpuPlace(tuple(chain), int(node), link, uplinks)


def gpu_topology(
    places: Sequence[GpuPlace],
    *,
    socket_of_node: Mapping[int, int],
    num_sockets: int,
    memory_gb_per_s: float,
    topo: TopoMatrix | None,
    cc: int,
    numbers: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Nodes and links as ``model.topology.Topology`` takes them. ``cc``: 90 for 9.0.

    ``numbers``: the driver's number of each GPU, where some are hidden (CUDA_VISIBLE_DEVICES).
    """
    nodes: dict[str, str] = {}
    links: list[dict[str, Any]] = []
    names: dict[tuple[str, str], str] = {}

    def node(kind: str, key: str) -> tuple[str, bool]:
        short = {"root_port": "root"}.get(kind, kind)
        fresh = (kind, key) not in names
        if fresh:
            count = sum(k == kind for k, _ in names)
            names[kind, key] = f"{short}{count}"
            nodes[f"{short}{count}"] = kind
        return names[kind, key], fresh

    for index, place in enumerate(places):
        gpu, _ = node("gpu", str(index))
        # without a port in sight (a virtual machine) the GPU has a root port of its own
        root_key = place.ports[0] if place.ports else f"of {gpu}"
        root, fresh = node("root_port", root_key)
        if fresh:
            socket = max(socket_of_node.get(place.numa_node, 0), 0)
            rate = max(
                [_signalled(place.link), *(_signalled(rate) for rate in place.uplinks.values())]
            )
            links.append(_plain(root, f"socket{socket}", "fabric", rate, _FABRIC_US))
        upper = root
        for uplink in place.ports[1::2]:
            switch, fresh = node("switch", uplink)
            if fresh:
                rate_up = place.uplinks.get(uplink, place.link)
                links.append(_pcie(switch, upper, rate_up, None, _UPLINK_US))
            upper = switch
        latency = _ROOT_PORT_US if upper == root else _SWITCH_PORT_US
        links.append(_pcie(gpu, upper, place.link, place.copy_gb_per_s, latency))
    for index in range(num_sockets):
        nodes[f"socket{index}"] = "socket"
        nodes[f"memory{index}"] = "host_memory"
        rate = memory_gb_per_s / num_sockets
        links.append(_plain(f"socket{index}", f"memory{index}", "memory", rate, _MEMORY_US))
        links += [
            _plain(f"socket{other}", f"socket{index}", "socket", _SOCKET_GB_PER_S, _SOCKET_US)
            for other in range(index)
        ]
    if topo is not None:
        ours = {number: index for index, number in enumerate(numbers or range(len(places)))}
        _add_nvlinks(topo, cc, ours, nodes, links)
    return {"nodes": [{"id": name, "kind": kind} for name, kind in nodes.items()], "links": links}


def _add_nvlinks(
    topo: TopoMatrix,
    cc: int,
    ours: Mapping[int, int],
    nodes: dict[str, str],
    links: list[dict[str, Any]],
) -> None:
    counts = {
        (ours[a], ours[b]): int(cell[2:])
        for a, b, cell in topo.gpu_pairs()
        if re.fullmatch(r"NV\d+", cell) and a in ours and b in ours
    }
    if not counts:
        return
    per_link = next((rate for least, rate in _NVLINK_GB_PER_S if cc >= least), 18.0)
    gpus = sorted({gpu for pair in counts for gpu in pair})
    equal = len(set(counts.values())) == 1 and len(counts) == len(gpus) * (len(gpus) - 1) // 2
    number = next(iter(counts.values()))
    if equal and number * (len(gpus) - 1) > _MOST_NVLINKS:
        nodes["nvswitch0"] = "nvswitch"
        links += [
            _plain(f"gpu{gpu}", "nvswitch0", "nvlink", number * per_link, _NVLINK_US)
            for gpu in gpus
        ]
        return
    links += [
        _plain(f"gpu{a}", f"gpu{b}", "nvlink", number * per_link, _NVLINK_US)
        for (a, b), number in counts.items()
    ]


def sockets_of_nodes(
    nodes: Path = Path("/sys/devices/system/node"), cpus: Path = Path("/sys/devices/system/cpu")
) -> dict[int, int]:
    """NUMA node -> socket (several nodes may share one), from the first CPU of each node."""
    packages: dict[int, str] = {}
    for path in sorted(nodes.glob("node[0-9]*")):
        first = re.match(r"\d+", _read(path / "cpulist") or "")
        if first:
            package = _read(cpus / f"cpu{first[0]}" / "topology/physical_package_id")
            packages[int(path.name[4:])] = package or "0"
    order = {package: i for i, package in enumerate(sorted(set(packages.values())))}
    return {node: order[package] for node, package in packages.items()}


def _pcie(
    a: str, b: str, rate: LinkRate, measured: float | None, latency_us: float
) -> dict[str, Any]:
    reached = _signalled(rate) * _REACHED if measured is None else measured
    return {
        **_plain(a, b, "pcie", min(reached, _signalled(rate)), latency_us),
        "pcie_gen": rate.gen,
        "pcie_width": rate.width,
    }


def _plain(a: str, b: str, kind: str, gb_per_s: float, latency_us: float) -> dict[str, Any]:
    return {"a": a, "b": b, "kind": kind, "gb_per_s": round(gb_per_s, 2), "latency_us": latency_us}


def _signalled(rate: LinkRate) -> float:
    return PCIE_LANE_GB_PER_S[rate.gen] * rate.width


def _link(device: Path | None, which: str) -> LinkRate | None:
    if device is None:
        return None
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", _read(device / f"{which}_link_speed") or "")
    width = _read(device / f"{which}_link_width") or ""
    gen = generation(float(speed[1])) if speed else None
    if gen is None or not width.isdigit() or int(width) not in (1, 2, 4, 8, 16):
        return None
    return LinkRate(gen, int(width))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
