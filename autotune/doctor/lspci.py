"""Reads ``lspci -vv`` (pciutils 3.5 to 3.13): links, ports, ACS, ASPM and errors of each device.

Text in, values out. Fields that the text does not carry are None; ``denied`` says that lspci was
not allowed to read the capabilities (it needs root for them).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

PortKind = Literal["endpoint", "root", "upstream", "downstream", "other"]

#: transfer rate in GT/s -> PCIe generation
GENERATIONS: Mapping[float, int] = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
#: correctable errors that mean a bad signal on the link; the rest is bookkeeping
_SIGNAL_ERRORS = ("RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout")

_DEVICE = re.compile(
    r"^(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7]) "
    r"([^:]+?)(?: \[[0-9a-f]{4}\])?: (.*)$"
)
_SPEED = re.compile(r"Speed (\d+(?:\.\d+)?)\s?GT/s")
_WIDTH = re.compile(r"Width x(\d+)")
_TARGET = re.compile(r"Target Link Speed: (\d+(?:\.\d+)?)\s?GT/s")
_ASPM_ON = re.compile(r"ASPM ((?:L0s|L1)(?:[ /]L1)?) Enabled")
_BUSES = re.compile(
    r"primary=([0-9a-fA-F]{2}), secondary=([0-9a-fA-F]{2}), subordinate=([0-9a-fA-F]{2})"
)
_FLAG = re.compile(r"(\w+)([+-])")
_EXPRESS: tuple[tuple[str, PortKind], ...] = (
    ("Root Port", "root"),
    ("Upstream Port", "upstream"),
    ("Downstream Port", "downstream"),
    ("Root Complex Integrated Endpoint", "other"),
    ("Endpoint", "endpoint"),
)


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Generation and lanes of one end of a link; 0 lanes means the link is down."""

    gen: int
    width: int

    def __str__(self) -> str:
        return f"Gen{self.gen} x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One device of the listing."""

    #: "0000:41:00.0"
    address: str
    kind_text: str
    description: str
    port: PortKind | None = None
    capable: LinkRate | None = None
    current: LinkRate | None = None
    target_gen: int | None = None
    #: "L1" or "L0s L1" when enabled, "" when disabled, None when not shown
    aspm: str | None = None
    #: ACS control bits, None when the device shows none
    acs: Mapping[str, bool] | None = None
    #: (secondary, subordinate) of a bridge
    buses: tuple[int, int] | None = None
    numa_node: int | None = None
    iommu_group: int | None = None
    #: correctable errors of the link that are noted; None when the device shows no error bits
    signal_errors: tuple[str, ...] | None = None
    #: lspci could not read the capabilities
    denied: bool = False
    #: the device answers with all ones: it fell off the bus
    dead: bool = False
    #: the text ends inside this device
    cut: bool = False

    @property
    def domain(self) -> str:
        """PCI domain."""
        return self.address.split(":")[0]

    @property
    def bus(self) -> int:
        """Bus number."""
        return int(self.address.split(":")[1], 16)

    @property
    def is_nvidia_gpu(self) -> bool:
        """Whether it is a display or 3D controller of NVIDIA."""
        maker = self.description.startswith("NVIDIA") or "10de:" in self.description
        return maker and self.kind_text in (
            "3D controller",
            "VGA compatible controller",
            "Display controller",
        )

    @property
    def title(self) -> str:
        """Kind of port and address, for a finding."""
        names = {"root": "root port", "upstream": "switch uplink", "downstream": "switch port"}
        return f"{names.get(self.port or '', 'PCI device')} {self.address}"


@dataclass(frozen=True)
class PciTree:
    """All devices of a listing."""

    devices: tuple[PciDevice, ...]

    @cached_property
    def by_address(self) -> Mapping[str, PciDevice]:
        """Devices by "0000:41:00.0"."""
        return {device.address: device for device in self.devices}

    @property
    def cut(self) -> bool:
        """Whether the text ends inside a device."""
        return any(device.cut for device in self.devices)

    @property
    def denied(self) -> bool:
        """Whether lspci was refused the capabilities."""
        return any(device.denied for device in self.devices)

    @property
    def gpus(self) -> tuple[PciDevice, ...]:
        """NVIDIA GPUs in the order listed."""
        return tuple(device for device in self.devices if device.is_nvidia_gpu)

    def parent(self, device: PciDevice) -> PciDevice | None:
        """The bridge whose secondary bus the device is on."""
        for bridge in self.devices:
            if bridge.buses and bridge.domain == device.domain and bridge.buses[0] == device.bus:
                return bridge
        return None

    def path(self, device: PciDevice) -> tuple[PciDevice, ...]:
        """From the device up to its root port, the device first."""
        found = [device]
        # a PCI hierarchy is at most 256 buses deep; a corrupt text could form a ring
        while len(found) < 256 and (above := self.parent(found[-1])) is not None:
            if above in found:
                break
            found.append(above)
        return tuple(found)

    def links(self, device: PciDevice) -> Iterator[tuple[PciDevice, PciDevice]]:
        """(lower end, upper end) of each physical link between the device and the root."""
        path = self.path(device)
        for lower, upper in pairwise(path):
            # inside a switch its ports are joined by no link
            if lower.port != "downstream" and upper.port != "upstream":
                yield lower, upper


def parse_lspci(text: str) -> PciTree:
    """Read a listing; whatever is no device line or known field is passed over."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if _DEVICE.match(line):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line)
    ends_whole = text.endswith("\n")
    return PciTree(
        tuple(_device(block, cut=not ends_whole and block is blocks[-1]) for block in blocks)
    )


def full_address(text: str) -> str:
    """ "00000000:C1:00.0" or "c1:00.0" -> "0000:c1:00.0"."""
    parts = text.strip().lower().split(":")
    domain = parts[0] if len(parts) == 3 else "0"
    return f"{int(domain, 16):04x}:{parts[-2]}:{parts[-1]}"


def generation(gt_per_s: float) -> int | None:
    """PCIe generation of a transfer rate, None for one that PCIe does not have."""
    return GENERATIONS.get(gt_per_s)


def _device(block: list[str], *, cut: bool) -> PciDevice:
    head = _DEVICE.match(block[0])
    assert head is not None
    domain, bus, slot, function, kind_text, description = head.groups()
    values: dict[str, object] = {}
    for line in block[1:]:
        values.update(_field(line.strip()))
    body = "\n".join(block)
    return PciDevice(
        address=f"{int(domain or '0', 16):04x}:{bus}:{slot}.{function}".lower(),
        kind_text=kind_text,
        description=description,
        denied="<access denied>" in body,
        dead="(rev ff)" in block[0] or "!!! Unknown header type 7f" in body,
        cut=cut,
        **values,  # type: ignore[arg-type]
    )


def _field(line: str) -> dict[str, object]:
    """What one indented line tells, by field of ``PciDevice``."""
    name, _, rest = line.partition(":")
    match name:
        case "LnkCap":
            return {"capable": _rate(rest)}
        case "LnkSta":
            return {"current": _rate(rest)}
        case "LnkCtl":
            enabled = _ASPM_ON.search(rest)
            return {"aspm": enabled.group(1) if enabled else "" if "ASPM" in rest else None}
        case "LnkCtl2":
            target = _TARGET.search(rest)
            return {"target_gen": generation(float(target.group(1))) if target else None}
        case "ACSCtl":
            return {"acs": {flag: sign == "+" for flag, sign in _FLAG.findall(rest)}}
        case "CESta":
            flags = {flag for flag, sign in _FLAG.findall(rest) if sign == "+"}
            return {"signal_errors": tuple(e for e in _SIGNAL_ERRORS if e in flags)}
        case "Bus":
            buses = _BUSES.search(rest)
            return {"buses": (int(buses[2], 16), int(buses[3], 16))} if buses else {}
        case "NUMA node":
            return {"numa_node": int(rest)} if rest.strip().lstrip("-").isdigit() else {}
        case "IOMMU group":
            return {"iommu_group": int(rest)} if rest.strip().isdigit() else {}
        case "Capabilities":
            for words, kind in _EXPRESS:
                if "Express" in rest and words in rest:
                    return {"port": kind}
    return {}


def _rate(text: str) -> LinkRate | None:
    speed, width = _SPEED.search(text), _WIDTH.search(text)
    gen = generation(float(speed.group(1))) if speed else None
    return None if gen is None or width is None else LinkRate(gen, int(width.group(1)))
