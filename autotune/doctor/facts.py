"""All evidence of one host, parsed; a piece that is not there says why."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from autotune.doctor.findings import Missing
from autotune.doctor.kernel_line import KernelLine, parse_kernel_line
from autotune.doctor.lspci import PciTree, parse_lspci
from autotune.doctor.smi import SmiLog, parse_smi
from autotune.doctor.sources import RECORDED, Recording
from autotune.doctor.system import Packages, SystemFacts, parse_packages, parse_system
from autotune.doctor.topo import TopoMatrix, parse_topo

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checks look at."""

    pci: PciTree | Missing
    smi: SmiLog | Missing
    #: the same while every GPU copies; taken only where an idle GPU had lowered its link
    smi_load: SmiLog | Missing
    topo: TopoMatrix | Missing
    p2p: TopoMatrix | Missing
    kernel: KernelLine | Missing
    system: SystemFacts | Missing
    packages: Packages | Missing
    live: bool

    @property
    def num_gpus(self) -> int:
        """NVIDIA GPUs that any piece of evidence shows."""
        counts = [0]
        if isinstance(self.smi, SmiLog):
            counts += [len(self.smi.gpus), self.smi.attached or 0]
        if isinstance(self.pci, PciTree):
            counts.append(len(self.pci.gpus))
        if isinstance(self.system, SystemFacts):
            counts.append(len(self.system.gpus))
        if isinstance(self.topo, TopoMatrix):
            counts.append(len(self.topo.gpus))
        return max(counts)

    @property
    def surely_no_gpu(self) -> bool:
        """Whether a look at the PCI bus, or the driver itself, showed that there is none."""
        listed = isinstance(self.pci, PciTree) and not self.pci.cut
        counted = isinstance(self.system, SystemFacts) and bool(self.system.num_pci_devices)
        return (listed or counted) and self.num_gpus == 0

    @property
    def unlisted(self) -> Missing | None:
        """Why lspci does not show every GPU and its path; None when it does."""
        if isinstance(self.pci, Missing):
            return self.pci
        again = "record it again, as root: " + RECORDED["lspci"].recipe
        if self.pci.cut:
            return Missing("the lspci text is cut", again)
        if len(self.pci.gpus) < self.num_gpus:
            return Missing(f"lspci lists {len(self.pci.gpus)} of {self.num_gpus} GPUs", again)
        return None

    @property
    def nvlink_everywhere(self) -> bool:
        """Whether all GPU pairs are joined by NVLink."""
        return isinstance(self.topo, TopoMatrix) and self.topo.all_nvlink

    @property
    def virtual(self) -> bool:
        """Whether the host says that it is a virtual machine."""
        return isinstance(self.system, SystemFacts) and bool(self.system.virtual)


def parse(recording: Recording) -> Facts:
    """Parse what is there; a text of the wrong kind counts as missing, with the reason."""

    def one(name: str, parser: Callable[[str], T]) -> T | Missing:
        text = recording.texts.get(name)
        if text is None:
            return recording.missing[name]
        try:
            return parser(text)
        except ValueError as error:
            source = RECORDED[name]
            return Missing(f"{source.file}: {error}", f"record it: {source.recipe}")

    return Facts(
        pci=one("lspci", _listing),
        smi=one("smi", parse_smi),
        smi_load=one("smi_load", parse_smi),
        topo=one("topo", parse_topo),
        p2p=one("p2p", parse_topo),
        kernel=one("cmdline", parse_kernel_line),
        system=one("system", parse_system),
        packages=one("packages", parse_packages),
        live=recording.live,
    )


def _listing(text: str) -> PciTree:
    tree = parse_lspci(text)
    if not tree.devices:
        first = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
        raise ValueError(f"no lspci listing; it begins with {first[:80]!r}")
    return tree
