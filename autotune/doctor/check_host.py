"""The rest of the host: NUMA placement, CPU governor, installed packages."""

from collections.abc import Iterator

from autotune.doctor.facts import Facts
from autotune.doctor.findings import Finding, Missing
from autotune.doctor.smi import SmiLog
from autotune.doctor.system import Packages, SystemFacts
from autotune.doctor.topo import TopoMatrix, cpu_set


def check_numa(facts: Facts) -> Iterator[Finding]:
    """Which NUMA node each GPU hangs on, and whether this process may run there."""
    check = "numa"
    nodes = _gpu_nodes(facts)
    system = facts.system if isinstance(facts.system, SystemFacts) else None
    num_nodes = len(system.nodes) if system and system.nodes else None
    if not nodes:
        if num_nodes == 1:
            yield Finding(
                id=check, severity="ok", subject="host", reason="one NUMA node, nothing to place"
            )
        else:
            yield Missing(
                "neither `nvidia-smi topo -m` nor /sys names a GPU's node",
                "record nvidia-smi topo -m",
            ).unknown(check, "GPUs", "NUMA placement")
        return
    lost = [gpu for gpu, node in nodes.items() if node < 0]
    if lost and num_nodes != 1:
        yield Finding(
            id=check,
            severity="warning" if num_nodes else "unknown",
            subject=", ".join(lost),
            reason="the firmware names no NUMA node (numa_node is -1): host threads and pinned "
            "memory land anywhere",
            fix="update the BIOS; until then bind by hand (numactl) after `nvidia-smi topo -m`",
        )
    by_node: dict[int, list[str]] = {}
    for gpu, node in nodes.items():
        by_node.setdefault(node, []).append(gpu)
    spread = ", ".join(f"node {n}: {len(gpus)}" for n, gpus in sorted(by_node.items()) if n >= 0)
    if spread:
        advice = "; host.numa_bind puts each worker beside its GPU" if len(by_node) > 1 else ""
        yield Finding(
            id=check, severity="info", subject="GPUs", reason=f"GPUs by NUMA node: {spread}{advice}"
        )
    yield from _affinity(facts, by_node)


def _affinity(facts: Facts, by_node: dict[int, list[str]]) -> Iterator[Finding]:
    """CPUs this process may use, against the CPUs beside the GPUs."""
    if not isinstance(facts.system, SystemFacts) or facts.system.allowed_cpus is None:
        return
    try:
        allowed = cpu_set(facts.system.allowed_cpus)
        cpus = {node: cpu_set(text) for node, text in facts.system.nodes.items()}
    except ValueError:
        return
    for node, gpus in sorted(by_node.items()):
        if cpus.get(node) and not cpus[node] & allowed:
            yield Finding(
                id="cpu-affinity",
                severity="warning",
                subject=", ".join(gpus),
                reason=f"on NUMA node {node} (CPUs {facts.system.nodes[node]}), but this process "
                f"may only use CPUs {facts.system.allowed_cpus}: every launch crosses the sockets",
                fix="widen the container's cpuset (docker --cpuset-cpus), or start without taskset",
            )


def _gpu_nodes(facts: Facts) -> dict[str, int]:
    """GPU -> NUMA node, -1 where the firmware names none."""
    if isinstance(facts.system, SystemFacts) and facts.system.gpus:
        found = {f"GPU {g.address}": g.numa_node for g in facts.system.gpus}
        return {gpu: node for gpu, node in found.items() if node is not None}
    if isinstance(facts.topo, TopoMatrix) and facts.topo.numa_affinity:
        return {
            f"GPU {gpu}": int(node.split("-")[0].split(",")[0])
            for gpu, node in facts.topo.numa_affinity.items()
        }
    if not isinstance(facts.pci, Missing):
        listed = {f"GPU {g.address}": g.numa_node for g in facts.pci.gpus}
        return {gpu: node for gpu, node in listed.items() if node is not None}
    return {}


def check_governor(facts: Facts) -> Iterator[Finding]:
    """CPUs that clock down between launches make every kernel launch slower."""
    check = "cpu-governor"
    if isinstance(facts.system, Missing):
        yield facts.system.unknown(check, "host", "CPU governor")
        return
    governors = facts.system.governors
    if not governors:
        where = "in a virtual machine the host decides" if facts.virtual else "no cpufreq in /sys"
        yield Missing(where, "look at the host's own governor").unknown(
            check, "host", "CPU governor"
        )
        return
    slow = {name: number for name, number in governors.items() if name != "performance"}
    total = sum(governors.values())
    if slow:
        listed = ", ".join(f"{name} on {number} of {total} CPUs" for name, number in slow.items())
        driver = f" ({facts.system.driver})" if facts.system.driver else ""
        yield Finding(
            id=check,
            severity="warning",
            subject="host",
            reason=f"{listed}{driver}: kernel launches wait for the clock to rise",
            fix="cpupower frequency-set -g performance",
        )
    else:
        reason = f"performance on all {total} CPUs"
        yield Finding(id=check, severity="ok", subject="host", reason=reason)


def check_packages(facts: Facts) -> Iterator[Finding]:
    """Versions, torch's CUDA against the driver's, and packages that get in each other's way."""
    if isinstance(facts.packages, Missing):
        yield facts.packages.unknown("packages", "Python", "installed packages")
        return
    have = facts.packages
    if "torch" in have.versions:
        yield from _torch(facts, have)
    else:
        yield Finding(
            id="torch",
            severity="error",
            subject="Python",
            reason="torch is not installed in this environment: the engine can't run",
            fix="make install (or pip install torch)",
        )
    if "kernels" in have.versions:
        yield Finding(
            id="kernels-package",
            severity="warning",
            subject="Python",
            reason=f"the Hugging Face package `kernels` {have.versions['kernels']} is installed "
            "beside ours, and both are imported as `kernels`: which one is found depends on the "
            "folder you start from",
            fix="pip uninstall kernels, or serve other software from an environment of its own",
        )
    if facts.live and "triton" not in have.versions:
        yield Finding(
            id="triton",
            severity="error" if facts.num_gpus else "warning",
            subject="Python",
            reason="triton is not installed: the GPU kernels can't run",
            fix="make install (or pip install triton)",
        )
    shown = ("autotune-moe", "torch", "triton", "optuna", "transformers", "sglang", "vllm")
    listed = [f"{name} {have.versions[name]}" for name in shown if name in have.versions]
    python = f"Python {have.python}" if have.python else "Python version not recorded"
    nccl = [f"{n} {v}" for n, v in sorted(have.versions.items()) if n.startswith("nvidia-nccl")]
    yield Finding(
        id="packages", severity="info", subject="Python", reason=", ".join([python, *listed, *nccl])
    )


def _torch(facts: Facts, have: Packages) -> Iterator[Finding]:
    version, cuda = have.versions["torch"], have.torch_cuda
    driver = facts.smi.cuda if isinstance(facts.smi, SmiLog) else None
    if cuda == "cpu":
        yield Finding(
            id="torch-cuda",
            severity="error" if facts.num_gpus else "ok",
            subject="Python",
            reason=f"torch {version} is a build without CUDA"
            + (f", but {facts.num_gpus} GPUs are here" if facts.num_gpus else ""),
            fix="pip install --force-reinstall torch (a CUDA build)" if facts.num_gpus else "",
        )
    elif not facts.num_gpus:
        return
    elif cuda is None or driver is None:
        what = "what CUDA torch was built with" if cuda is None else "the driver's CUDA version"
        missing = Missing(f"{what} is not recorded")
        yield missing.unknown("torch-cuda", "Python", "torch's CUDA against the driver")
    elif _version(cuda)[0] > _version(driver)[0]:
        yield Finding(
            id="torch-cuda",
            severity="error",
            subject="Python",
            reason=f"torch {version} is built for CUDA {cuda}, the driver runs CUDA {driver} at "
            "most",
            fix=f"update the driver, or install a torch build for CUDA {_version(driver)[0]}",
        )
    else:
        newer = _version(cuda) > _version(driver)
        note = " (a newer minor version: kernels compiled at run time may fail)" if newer else ""
        yield Finding(
            id="torch-cuda",
            severity="warning" if newer else "ok",
            subject="Python",
            reason=f"torch {version} for CUDA {cuda}, driver for CUDA {driver}{note}",
            fix="update the driver" if newer else "",
        )


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
