"""What the kernel and the Python environment tell without a tool: collected as text, parsed.

The text has one fact a line, ``PATH:value``, as ``grep -H . PATH`` prints it. A path that could
not be read has no line. Three lines are made up: ``/sys/kernel/iommu_groups/count`` (groups),
``/sys/bus/pci/count`` (number of PCI devices) and ``/proc/cpuinfo/hypervisor`` (0 or 1).
"""

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.doctor.lspci import LinkRate, generation

_PCI = Path("/sys/bus/pci/devices")
_PCI_FACTS = (
    "vendor",
    "class",
    "numa_node",
    "current_link_speed",
    "max_link_speed",
    "current_link_width",
    "max_link_width",
    "iommu_group/type",
)
_CPU_FACTS = ("cpufreq/scaling_governor", "cpufreq/scaling_driver")
_FILES = (
    "/sys/module/pcie_aspm/parameters/policy",
    "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/class/dmi/id/product_name",
)
_LEAVES = (
    *(name.rsplit("/")[-1] for name in (*_PCI_FACTS, *_CPU_FACTS)),
    "policy",
    "uvm_disable_hmm",
    "sys_vendor",
    "product_name",
    "cpulist",
    "Cpus_allowed_list",
    "count",
    "hypervisor",
)
_LINE = re.compile(r"^(/\S*/(?:" + "|".join(_LEAVES) + r")):(.*)$")
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380")
_BRIDGE_CLASS = "0x0604"
_NVIDIA = "0x10de"
#: distributions that decide how fast or whether we run
PACKAGES = (
    "autotune-moe",
    "torch",
    "triton",
    "numpy",
    "optuna",
    "optuna-dashboard",
    "sqlalchemy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "transformers",
    "sglang",
    "vllm",
    "flashinfer-python",
    "kernels",
)


def host_facts() -> str:
    """Facts of this host, one a line."""
    devices = sorted(_PCI.glob("*"))
    lines = [f"/sys/bus/pci/count:{len(devices)}"]
    for device in devices:
        kind, vendor = _read(device / "class") or "", _read(device / "vendor")
        if kind.startswith(_BRIDGE_CLASS) or (vendor == _NVIDIA and kind.startswith(_GPU_CLASSES)):
            lines += _lines(device / name for name in _PCI_FACTS)
    for cpu in sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*")):
        lines += _lines(cpu / name for name in _CPU_FACTS)
    lines += _lines(sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")))
    lines += _lines(Path(name) for name in _FILES)
    groups = Path("/sys/kernel/iommu_groups")
    if groups.is_dir():
        lines.append(f"{groups}/count:{sum(1 for _ in groups.iterdir())}")
    lines += [
        f"/proc/self/status/Cpus_allowed_list:{line.partition(':')[2].strip()}"
        for line in (_read(Path("/proc/self/status")) or "").splitlines()
        if line.startswith("Cpus_allowed_list:")
    ]
    info = _read(Path("/proc/cpuinfo"))
    if info is not None:
        flags = next((x for x in info.splitlines() if x.startswith("flags")), "")
        lines.append(f"/proc/cpuinfo/hypervisor:{int('hypervisor' in flags.split())}")
    return "\n".join(lines) + "\n"


def package_facts() -> str:
    """Installed packages as ``pip freeze`` writes them, Python and torch's CUDA as comments."""
    lines = [f"# python=={platform.python_version()}"]
    cuda = _torch_cuda()
    if cuda is not None:
        lines.append(f"# torch-cuda=={cuda}")
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in PACKAGES or name.startswith("nvidia-"):
            found[name] = distribution.version
    return "\n".join([*lines, *(f"{n}=={v}" for n, v in sorted(found.items()))]) + "\n"


def _torch_cuda() -> str | None:
    """CUDA version torch was built with, "cpu" without; read from its file, as import is slow."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = _read(Path(spec.origin).parent / "version.py") or ""
    found = re.search(r"^cuda\b[^=\n]*=\s*(.+)$", text, re.MULTILINE)
    if found is None:
        return None
    value = found.group(1).strip().strip("'\"")
    return "cpu" if value == "None" else value


@dataclass(frozen=True, slots=True, kw_only=True)
class SysPci:
    """A PCI device in sysfs."""

    address: str
    is_gpu: bool
    current: LinkRate | None
    maximum: LinkRate | None
    numa_node: int | None
    #: "identity" (passed through), "DMA" or "DMA-FQ" (translated); None without a group
    iommu_type: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """The parsed facts; empty or None where there was no line."""

    pci: Mapping[str, SysPci]
    #: governor -> number of CPUs
    governors: Mapping[str, int]
    driver: str | None
    #: NUMA node -> its CPUs, as the kernel writes them
    nodes: Mapping[int, str]
    aspm_policy: str | None
    hmm_disabled: bool | None
    allowed_cpus: str | None
    num_iommu_groups: int | None
    num_pci_devices: int | None
    virtual: bool | None
    product: str | None

    @property
    def gpus(self) -> tuple[SysPci, ...]:
        """NVIDIA GPUs on the PCI bus."""
        return tuple(device for device in self.pci.values() if device.is_gpu)


def parse_system(text: str) -> SystemFacts:
    """Read facts; a line of another form is passed over."""
    values = {m[1]: m[2].strip() for line in text.splitlines() if (m := _LINE.match(line))}
    devices = sorted({p.split("/")[5] for p in values if p.startswith("/sys/bus/pci/devices/")})
    governors: dict[str, int] = {}
    nodes: dict[int, str] = {}
    for path, value in values.items():
        if path.endswith("/scaling_governor"):
            governors[value] = governors.get(value, 0) + 1
        elif node := re.match(r"/sys/devices/system/node/node(\d+)/cpulist$", path):
            nodes[int(node[1])] = value
    policy = re.search(r"\[(\w+)\]", values.get("/sys/module/pcie_aspm/parameters/policy", ""))
    disabled = values.get("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "")
    hypervisor = values.get("/proc/cpuinfo/hypervisor")
    return SystemFacts(
        pci={address: _pci(address, values) for address in devices},
        governors=governors,
        driver=next((v for p, v in values.items() if p.endswith("/scaling_driver")), None),
        nodes={node: nodes[node] for node in sorted(nodes)},
        aspm_policy=policy[1] if policy else None,
        hmm_disabled={"Y": True, "1": True, "N": False, "0": False}.get(disabled),
        allowed_cpus=values.get("/proc/self/status/Cpus_allowed_list"),
        num_iommu_groups=_whole(values.get("/sys/kernel/iommu_groups/count")),
        num_pci_devices=_whole(values.get("/sys/bus/pci/count")),
        virtual=None if hypervisor is None else hypervisor == "1",
        product=values.get("/sys/class/dmi/id/product_name"),
    )


def _pci(address: str, values: Mapping[str, str]) -> SysPci:
    def get(name: str) -> str | None:
        return values.get(f"/sys/bus/pci/devices/{address}/{name}")

    return SysPci(
        address=address.lower(),
        is_gpu=get("vendor") == _NVIDIA and (get("class") or "").startswith(_GPU_CLASSES),
        current=_rate(get("current_link_speed"), get("current_link_width")),
        maximum=_rate(get("max_link_speed"), get("max_link_width")),
        numa_node=_whole(get("numa_node")),
        iommu_type=get("iommu_group/type"),
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"-?\d+", text) else None


def _rate(speed: str | None, width: str | None) -> LinkRate | None:
    """From "32.0 GT/s PCIe" and "16"."""
    found = re.match(r"(\d+(?:\.\d+)?) GT/s", speed or "")
    gen = generation(float(found[1])) if found else None
    if gen is None or width is None or not width.isdigit():
        return None
    # devices without a link report 255 lanes
    return LinkRate(gen, int(width)) if 0 < int(width) <= 32 else None


@dataclass(frozen=True, slots=True)
class Packages:
    """Installed packages by name, Python's version, and the CUDA that torch was built with."""

    versions: Mapping[str, str]
    python: str | None
    #: "13.0", or "cpu" for a build without CUDA
    torch_cuda: str | None


def parse_packages(text: str) -> Packages:
    """Read ``pip freeze`` or ``pip list`` output, with or without our comment lines."""
    versions: dict[str, str] = {}
    special: dict[str, str] = {}
    for line in text.splitlines():
        found = re.match(r"^(# )?([A-Za-z0-9][\w.-]*)(?:==|\s+)([\w.+!-]+)", line.strip())
        if found is None or (not found[3][0].isdigit() and found[3] != "cpu"):
            continue
        name = found[2].lower().replace("_", "-")
        (special if found[1] else versions)[name] = found[3]
    cuda = special.get("torch-cuda")
    local = re.search(r"\+(cpu|cu\d+)", versions.get("torch", ""))
    if cuda is None and local:
        cuda = "cpu" if local[1] == "cpu" else f"{local[1][2:-1]}.{local[1][-1]}"
    return Packages(versions, special.get("python"), cuda)


def _lines(paths: Iterator[Path] | list[Path]) -> list[str]:
    return [f"{path}:{value}" for path in paths if (value := _read(path))]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
