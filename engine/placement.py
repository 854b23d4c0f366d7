"""Which CPUs a worker runs on when ``host.numa_bind`` is set."""

import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def parse_cpu_list(text: str) -> set[int]:
    """``"0-3,8"`` -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            cpus |= set(range(int(low), int(high or low) + 1))
    return cpus


def numa_nodes() -> list[set[int]]:
    """CPUs of each NUMA node that has any, by node number."""
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda p: int(p.parent.name[4:]))
    return [cpus for path in lists if (cpus := parse_cpu_list(path.read_text()))]


def cpus_of_rank(
    rank: int, tp: int, allowed: set[int], nodes: list[set[int]], node: int | None = None
) -> set[int]:
    """CPUs for a rank: its GPU's NUMA ``node``, or a fair share of the allowed CPUs.

    Without a GPU, ranks are dealt to nodes in blocks and split each node's CPUs among them; with
    fewer CPUs than ranks, neighbours share one.
    """
    if node is not None and node < len(nodes) and nodes[node] & allowed:
        return nodes[node] & allowed
    usable = [sorted(n & allowed) for n in nodes if n & allowed] or [sorted(allowed)]
    home = rank * len(usable) // tp
    sharing = [r for r in range(tp) if r * len(usable) // tp == home]
    cpus, place = usable[home], sharing.index(rank)
    start = place * len(cpus) // len(sharing)
    stop = (place + 1) * len(cpus) // len(sharing)
    return set(cpus[start : max(stop, start + 1)])


def gpu_numa_node(pci_bus_id: str) -> int | None:
    """NUMA node of a GPU by its PCI address; None where the host does not say."""
    path = Path("/sys/bus/pci/devices") / pci_bus_id.lower() / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind(rank: int, tp: int, node: int | None = None) -> None:
    """Bind this process (and the threads it will start)."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus_of_rank(rank, tp, set(allowed), numa_nodes(), node))
