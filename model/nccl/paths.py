"""NCCL's words for how far apart two devices are, and its fixed bandwidths per kind of link.

Source: NVIDIA/nccl 2.27.5 to 2.30.7, src/graph/topo.h and topo.cc (read, facts only). Bandwidths
are GB/s = 10^9 bytes per second per direction: what NCCL *assumes*, not what a link reaches.
"""

from collections.abc import Mapping

#: nearest first; NCCL compares ranks in this list
PATH_TYPES = (
    "LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS",
)  # fmt: skip
PATH_RANK: Mapping[str, int] = {name: rank for rank, name in enumerate(PATH_TYPES)}
LOC, NVL, NVB, PIX, PXB, PXN, PHB, SYS, NET, DIS = (
    PATH_RANK[name]
    for name in ("LOC", "NVL", "NVB", "PIX", "PXB", "PXN", "PHB", "SYS", "NET", "DIS")
)
#: NCCL_P2P_LEVEL as a number 0..5, kept from old releases; larger ones count as 5
OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")

#: bandwidth of a device to itself
LOCAL_GB_PER_S = 5000.0
#: ring bandwidth up to which Ring/Simple runs 256 threads instead of 512 (Gen3 x16)
SLOW_RING_GB_PER_S = 12.0
#: GPU-to-GPU traffic through an Intel host bridge takes this much more of a PCIe link
INTEL_HOST_BRIDGE_OVERHEAD = 1.2

#: 100 Mb/s per lane after encoding, by PCIe generation
_PCIE_LANE: Mapping[int, int] = {1: 15, 2: 30, 3: 60, 4: 120, 5: 240, 6: 480}


def pcie_gb_per_s(gen: int, width: int) -> float:
    """What NCCL counts for a PCIe link; raises ``ValueError`` for an unknown generation."""
    if gen not in _PCIE_LANE:
        raise ValueError(f"PCIe generation {gen} is unknown; known: 1 to 6")
    return width * _PCIE_LANE[gen] / 80.0


def nvlink_gb_per_s(compute_capability: int) -> float:
    """What NCCL counts for one NVLink of a GPU (90 = Hopper)."""
    if compute_capability >= 100:
        return 40.1
    if compute_capability >= 90:
        return 20.6
    if compute_capability == 86:
        return 12.0
    if compute_capability >= 70:
        return 20.0
    return 18.0


#: between NUMA nodes, by (vendor, processor generation); any AMD counts 16
_INTEL_SOCKET: Mapping[str, float] = {
    "BDW": 6.0,
    "SKL": 10.0, "SKX": 10.0, "CLX": 10.0, "CPX": 10.0, "ICX": 10.0,
    "SPR": 22.0, "GNR": 22.0, "SRF": 22.0,
    "EMR": 40.0,
}  # fmt: skip
#: the model number in NCCL's printed topology (CPU/.. (arch/vendor/model)) of an Intel processor
INTEL_MODEL_NUMBER: Mapping[int, str] = {1: "BDW", 2: "SKL", 3: "SPR", 4: "EMR"}


def socket_gb_per_s(vendor: str, generation: str | None) -> float:
    """What NCCL counts between two NUMA nodes; raises ``ValueError`` when it cannot be told."""
    if vendor == "amd":
        return 16.0
    if vendor == "arm":
        return 6.0
    if vendor == "intel":
        rate = _INTEL_SOCKET.get(generation or "")
        if rate is None:
            raise ValueError(
                f"cpu.generation {generation!r} of an Intel host with several sockets decides "
                f"what NCCL assumes between them; known: {', '.join(_INTEL_SOCKET)}"
            )
        return rate
    return LOCAL_GB_PER_S
