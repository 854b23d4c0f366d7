"""From timings and /sys to a ``Machine``: every value with its source."""

import os
import platform
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from autotune.doctor.check_p2p import iommu_mode, redirecting_ports
from autotune.doctor.facts import Facts, parse
from autotune.doctor.smi import SmiLog
from autotune.doctor.sources import record_host
from autotune.doctor.topo import TopoMatrix
from autotune.errors import AutotuneError
from autotune.probe.host_graph import (
    PCI_DEVICES,
    GpuPlace,
    gpu_topology,
    place_of,
    sockets_of_nodes,
)
from autotune.probe.timings import Device, Timings
from model.machine import Machine

#: rate of one all-core memory read is taken for a host whose memory was not timed, GB/s
_UNTIMED_MEMORY_GB_PER_S = 10.0


def build_machine(
    timings: Timings,
    device: Device,
    name: str | None = None,
    *,
    facts: Facts | None = None,
    devices: Path = PCI_DEVICES,
    host_fingerprint: str | None = None,
) -> Machine:
    """This host with what was timed. Raises ``AutotuneError`` when a GPU can't be placed.

    ``facts``: what the doctor read of this host (read now without). ``devices``: its PCI devices.
    ``host_fingerprint``: what the engine calls this host; a best-config file is bound to it.
    """
    date = datetime.now(UTC).date().isoformat()
    sockets = max(1, len(set(sockets_of_nodes().values())))
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    memory = timings.host_read.median if timings.host_read else _UNTIMED_MEMORY_GB_PER_S
    values: dict[str, Any] = {
        "name": name or f"{platform.node() or 'this-host'}-{device}",
        "gpu": None,
        "cpu": {
            "vendor": _vendor(),
            "model": cpu_field("model name") or platform.machine() or "unknown",
            "sockets": sockets,
            "cores_per_socket": max(1, cores // sockets),
        },
        "p2p": {"possible": False},
        "software": {"nccl_version": timings.nccl_version, "has_nic": has_nic()},
        "measured": _measured(timings),
        "host_fingerprint": host_fingerprint,
        "sources": _sources(timings, device, date),
    }
    if device == "cuda":
        facts = facts or parse(record_host())
        values |= _gpu_part(timings, facts, devices, sockets, memory)
        values["software"] |= _software(facts)
    else:
        values["topology"] = gpu_topology(
            [], socket_of_node={}, num_sockets=sockets, memory_gb_per_s=memory, topo=None, cc=0
        )
    return Machine.from_dict(values, where="probe of this host")


def _gpu_part(
    timings: Timings, facts: Facts, devices: Path, sockets: int, memory: float
) -> dict[str, Any]:
    if not timings.gpus:
        why = timings.skipped.get("GPU rates", "they were not timed")
        raise AutotuneError(
            f"probe: the GPUs give no numbers ({why}); `autotune doctor` says what is wrong, "
            "--device cpu probes the host without them"
        )
    names = {gpu["name"] for gpu in timings.gpus}
    if len(names) > 1:
        raise AutotuneError(
            f"probe: a machine has equal GPUs, here are {', '.join(sorted(names))}; choose one "
            "kind with CUDA_VISIBLE_DEVICES"
        )
    gpu = timings.gpus[0]
    places = [_place(facts, devices, index, row) for index, row in enumerate(timings.gpus)]
    major, _, minor = str(gpu["capability"]).partition(".")
    peak = _dram_peak(gpu)
    dram = peak or _best(timings, "dram")
    return {
        "gpu": {
            "name": gpu["name"],
            "count": len(timings.gpus),
            "compute_capability": gpu["capability"],
            "num_sms": gpu["num_sms"],
            "dram_gb_per_s": round(dram, 1),
            "l2_mib": round((gpu["l2_bytes"] or 4 * 2**20) / 2**20, 2),
            "memory_gib": round(gpu["memory_bytes"] / 2**30, 1),
            "bf16_tflops": round(_best(timings, "bf16_tflops"), 1),
            "smem_per_block_kib": round((gpu["smem_bytes"] or 48 * 1024) / 1024),
        },
        "p2p": {
            "possible": bool(timings.peers) and all(ok for _, _, ok in timings.peers),
            "forced_through_host": os.environ.get("NCCL_P2P_DISABLE") == "1",
        },
        "topology": gpu_topology(
            places,
            socket_of_node=sockets_of_nodes(),
            num_sockets=sockets,
            memory_gb_per_s=memory,
            topo=facts.topo if isinstance(facts.topo, TopoMatrix) else None,
            cc=int(major) * 10 + int(minor),
            numbers=_driver_numbers(timings, facts),
        ),
    }


def _driver_numbers(timings: Timings, facts: Facts) -> list[int] | None:
    """The driver's number of each GPU that torch sees; None when addresses do not tell."""
    if not isinstance(facts.smi, SmiLog):
        return None
    known = {gpu.address: gpu.index for gpu in facts.smi.gpus}
    addresses = [row.get("address") for row in timings.gpus]
    if not all(address in known for address in addresses):
        return None
    return [known[str(address)] for address in addresses]


def _place(facts: Facts, devices: Path, index: int, row: Mapping[str, Any]) -> GpuPlace:
    """A GPU's place in /sys, with the slower of its two copy rates as its link's rate."""
    address = row.get("address")
    if address is None and isinstance(facts.smi, SmiLog) and index < len(facts.smi.gpus):
        address = facts.smi.gpus[index].address
    try:
        place = place_of(str(address), devices)
    except ValueError as error:
        raise AutotuneError(f"probe: GPU {index}: {error}") from None
    copies = [statistics.median(row[way]) for way in ("to_gpu", "to_host") if row.get(way)]
    return replace(place, copy_gb_per_s=min(copies)) if copies else place


def _measured(timings: Timings) -> dict[str, Any]:
    if timings.gpus:
        dram: float | None = round(
            statistics.median(v for gpu in timings.gpus for v in gpu["dram"]), 1
        )
    else:
        dram = None if timings.host_read is None else round(timings.host_read.median, 2)
    eager, graph = timings.launch_eager, timings.launch_graph
    return {
        "dram_gb_per_s": dram,
        "launch_eager": None if eager is None else eager.spread(),
        "launch_graph": None if graph is None else graph.spread(),
        "allreduce": [
            {
                "backend": row.backend,
                "num_ranks": row.num_ranks,
                "size_bytes": row.size_bytes,
                "mode": "eager",
                "time_us": round(row.time.median, 2),
                "env": dict(row.env),
            }
            for row in timings.allreduce
        ],
    }


def _sources(timings: Timings, device: Device, date: str) -> dict[str, str]:
    """Where each value is from: what was timed, how often, how it spread, when."""
    stamp = f"autotune probe, {date}, load average {os.getloadavg()[0]:.1f}"
    found = {
        "cpu": f"/proc/cpuinfo and psutil, {date}",
        "topology.nodes": f"/sys/bus/pci/devices and /sys/devices/system/node, {date}",
        "p2p": "no GPU is used" if device == "cpu" else f"torch can_device_access_peer, {date}",
        "software": "no NCCL: gloo carries the all-reduce"
        if device == "cpu"
        else f"torch, nvidia-smi, kernel command line, {date}",
        "topology.links.socket": "not measured: 45 GB/s and 0.15 us are judged",
    }
    if timings.host_read is not None:
        found["topology.links.memory"] = (
            f"{stamp}: all cores reading together, {timings.host_read.text('GB/s')}, over the "
            "sockets; latency judged"
        )
    else:
        found["topology.links.memory"] = "not timed, judged"
    if timings.gpus:
        n = len(timings.gpus[0]["to_gpu"])
        found |= {
            "gpu": f"torch.cuda.get_device_properties, {date}",
            "gpu.bf16_tflops": f"{stamp}: best of {len(timings.gpus[0]['bf16_tflops'])} matmuls of "
            "8192; a data sheet's peak is higher",
            "gpu.dram_gb_per_s": f"memory clock x bus width by the driver, {date}"
            if _dram_peak(timings.gpus[0])
            else f"{stamp}: best read of 1 GiB (the driver does not tell clock and bus width)",
            "topology.links.pcie": f"{stamp}: a GPU's link: the slower of both directions of {n} "
            "pinned copies of 256 MiB; a switch's uplink: 87 % of its signalling rate; latency by "
            "rtx6kpro notes",
            "topology.links.fabric": "no narrower than its link; latency judged",
            "topology.links.nvlink": "links by nvidia-smi topo -m, rate per link as NCCL counts it",
            "measured.dram_gb_per_s": f"{stamp}: median read of 1 GiB on every GPU",
        }
    elif timings.host_read is not None:
        found["measured.dram_gb_per_s"] = (
            f"{stamp}: all cores reading together, {timings.host_read.text('GB/s')}"
        )
    for key, sample in (
        ("measured.launch_eager", timings.launch_eager),
        ("measured.launch_graph", timings.launch_graph),
    ):
        if sample is not None:
            found[key] = f"{stamp}: per op of 100 tiny ones, {sample.text('us')}"
    if timings.allreduce:
        rows = timings.allreduce
        wide = max(rows, key=lambda row: row.time.p95 / row.time.p05)
        bimodal = sum(row.time.modes is not None for row in rows)
        found["measured.allreduce"] = (
            f"{stamp}: engine ranks, medians of {rows[0].time.n} repeats as rank 0 sees them, each "
            f"waited for; widest: {wide.backend} x {wide.num_ranks}, {wide.size_bytes} bytes, "
            f"{wide.time.text('us')}; {bimodal} of {len(rows)} rows bimodal"
        )
    for part, why in timings.skipped.items():
        found[f"skipped.{part}"] = why
    return found


def _software(facts: Facts) -> dict[str, Any]:
    mode, _ = iommu_mode(facts)
    return {
        "driver": facts.smi.driver if isinstance(facts.smi, SmiLog) else None,
        "iommu": mode,
        "acs_redirect": redirecting_ports(facts),
    }


def _dram_peak(gpu: Mapping[str, Any]) -> float | None:
    """GB/s: two transfers a clock over the bus."""
    clock, bits = gpu.get("memory_clock_khz"), gpu.get("memory_bus_bits")
    return 2 * clock * bits / 8 / 1e6 if clock and bits else None


def _best(timings: Timings, key: str) -> float:
    """The best repeat of the slowest GPU: what every rank can reach."""
    return float(min(max(gpu[key]) for gpu in timings.gpus))


def has_nic() -> bool:
    """Whether a network device other than the loopback is there, as NCCL looks for one."""
    virtual = re.compile(r"^(lo|docker|veth|br-|virbr)")
    return any(not virtual.match(path.name) for path in Path("/sys/class/net").glob("*"))


def cpu_field(name: str) -> str | None:
    """First value of a line of /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.partition(":")[0].strip() == name
        ),
        None,
    )


def _vendor() -> str:
    text = (cpu_field("vendor_id") or "").lower()
    if platform.machine() == "aarch64":
        return "arm"
    return "intel" if "intel" in text else "amd" if "amd" in text else "other"
