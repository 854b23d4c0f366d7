"""Reads the kernel command line."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

IommuMode = Literal["off", "pt", "on"]


@dataclass(frozen=True, slots=True)
class KernelLine:
    """Parameters by name; a repeated one has several values, as later ones may add to earlier."""

    values: Mapping[str, tuple[str, ...]]

    @property
    def iommu(self) -> IommuMode | None:
        """What the line asks for; None when it leaves the mode to the kernel's default."""
        vendor = [
            word
            for name in ("intel_iommu", "amd_iommu")
            for value in self.values.get(name, ())
            for word in value.split(",")
        ]
        common = [word for value in self.values.get("iommu", ()) for word in value.split(",")]
        if "off" in vendor or "off" in common:
            return "off"
        through = self.values.get("iommu.passthrough", ())
        if "pt" in common or (through and through[-1] in ("1", "y", "Y")):
            return "pt"
        if "nopt" in common or (through and through[-1] in ("0", "n", "N")):
            return "on"
        # amd_iommu=on is no value that the kernel knows; the AMD IOMMU is on by default
        return "on" if "on" in vendor or "force" in common else None

    @property
    def iommu_text(self) -> str:
        """The parameters that concern the IOMMU, as written."""
        names = ("intel_iommu", "amd_iommu", "iommu", "iommu.passthrough", "iommu.strict")
        found = [f"{n}={v}" for n in names for v in self.values.get(n, ())]
        return " ".join(found) or "no iommu parameter"

    def has(self, name: str, value: str) -> bool:
        """Whether ``name=value`` stands there."""
        return value in self.values.get(name, ())


def parse_kernel_line(text: str) -> KernelLine:
    """Split the line; what follows ``--`` belongs to init."""
    found: dict[str, tuple[str, ...]] = {}
    for word in text.split():
        if word == "--":
            break
        name, _, value = word.partition("=")
        # the kernel takes - and _ in names as one
        key = name.replace("-", "_")
        found[key] = (*found.get(key, ()), value.strip('"'))
    return KernelLine(found)
