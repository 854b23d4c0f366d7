"""Traffic between GPUs: ACS, IOMMU, peer access, BAR size, HMM."""

from collections.abc import Iterator
from typing import Literal

from autotune.doctor.facts import Facts
from autotune.doctor.findings import Finding, Missing, Severity
from autotune.doctor.kernel_line import KernelLine
from autotune.doctor.lspci import PciDevice, PciTree
from autotune.doctor.smi import SmiLog
from autotune.doctor.system import SystemFacts
from autotune.doctor.topo import P2P_STATES

_REDIRECTS = ("ReqRedir", "CmpltRedir")
#: below this a BAR cannot map a GPU's memory for its peers: the size without resizable BAR
_SMALL_BAR_MIB = 1024


def check_acs(facts: Facts) -> Iterator[Finding]:
    """ACS redirection sends peer traffic up to the root complex instead of across the switch."""
    check = "acs-redirect"
    if isinstance(facts.pci, Missing):
        yield facts.pci.unknown(check, "host", "ACS")
        return
    if facts.pci.denied:
        yield Missing(
            "lspci was not allowed to read the capabilities (<access denied>)", "run as root (sudo)"
        ).unknown(check, "host", "ACS")
        return
    ports = _ports(facts.pci)
    on = [port for port in ports if _redirects(port)]
    severity: Severity = "warning" if facts.nvlink_everywhere else "error"
    for kind, title in (("downstream", "switch ports"), ("root", "root ports"), (None, "bridges")):
        mine = [p for p in on if p.port == kind or (kind is None and p.port not in _PORT_KINDS)]
        if not mine:
            continue
        bits = sorted({bit for port in mine for bit in _redirects(port)})
        addresses = ", ".join(port.address for port in mine)
        effect = (
            "GPU-to-GPU traffic goes by NVLink here; other peer traffic is redirected"
            if facts.nvlink_everywhere
            else "peer traffic goes up to the root complex and through the IOMMU: lower rate, "
            "and hangs when the IOMMU translates"
        )
        yield Finding(
            id=check,
            severity=severity,
            subject=f"{len(mine)} {title}",
            reason=f"{' and '.join(bits)} on at {addresses}: {effect}",
            fix="disable ACS in the BIOS, or until the next boot: "
            + "; ".join(f"setpci -s {port.address} ECAP_ACS+0x6.w=0000" for port in mine),
        )
    if facts.unlisted is not None:
        yield facts.unlisted.unknown(check, "host", "ACS of the other ports")
    elif not on and ports:
        shown = sum(port.acs is not None for port in ports)
        reason = f"no redirection on {len(ports)} ports above GPUs ({shown} have ACS)"
        yield Finding(id=check, severity="ok", subject="host", reason=reason)
    elif not ports:
        yield Missing(
            "no port above a GPU is listed", "run the doctor on the host itself, as root"
        ).unknown(check, "host", "ACS")


def redirecting_ports(facts: Facts) -> bool | None:
    """Whether any port above a GPU redirects peer traffic; None when that was not to be seen."""
    if isinstance(facts.pci, Missing) or facts.pci.denied:
        return None
    ports = _ports(facts.pci)
    if any(_redirects(port) for port in ports):
        return True
    return False if ports and facts.unlisted is None else None


def check_iommu(facts: Facts) -> Iterator[Finding]:
    """A translating IOMMU between GPUs: peer traffic hangs, corrupts or crawls."""
    check = "iommu"
    mode, evidence = iommu_mode(facts)
    line = facts.kernel.iommu_text if isinstance(facts.kernel, KernelLine) else "not seen"
    if mode is None:
        yield Missing(
            evidence, "look at /sys/bus/pci/devices/<GPU>/iommu_group/type and /proc/cmdline"
        ).unknown(check, "host", "IOMMU mode")
        return
    if mode == "on":
        many = facts.num_gpus > 1 and not facts.nvlink_everywhere
        yield Finding(
            id=check,
            severity="error" if many else "warning",
            subject="host",
            reason=f"the IOMMU translates DMA addresses ({evidence}; kernel line: {line}): peer "
            "traffic between GPUs can hang or be slow",
            fix="add iommu=pt to GRUB_CMDLINE_LINUX (or switch the IOMMU off in the BIOS), "
            "update-grub, reboot",
        )
        return
    names = {"off": "off", "pt": "passed through"}
    reason = f"{names[mode]} ({evidence}; kernel line: {line})"
    yield Finding(id=check, severity="ok", subject="host", reason=reason)


def iommu_mode(facts: Facts) -> tuple[Literal["off", "pt", "on"] | None, str]:
    """The mode in force and what shows it; sysfs before the command line, which only asks."""
    if isinstance(facts.system, SystemFacts):
        types = {gpu.iommu_type for gpu in facts.system.gpus if gpu.iommu_type is not None}
        if types:
            shown = "groups of the GPUs: " + ", ".join(sorted(types))
            return ("pt" if types == {"identity"} else "on"), shown
        if facts.system.num_iommu_groups == 0:
            where = "no IOMMU groups"
            return "off", f"{where}, inside a virtual machine" if facts.virtual else where
    if isinstance(facts.kernel, KernelLine) and facts.kernel.iommu is not None:
        return facts.kernel.iommu, "kernel command line"
    if isinstance(facts.pci, PciTree) and any(g.iommu_group is not None for g in facts.pci.gpus):
        return None, "the IOMMU is on (lspci shows groups), whether it translates is not shown"
    return None, "neither IOMMU groups nor the kernel command line tell"


def check_peer_access(facts: Facts) -> Iterator[Finding]:
    """Whether the driver lets each pair of GPUs reach each other."""
    check = "p2p"
    if facts.num_gpus < 2:
        return
    if isinstance(facts.p2p, Missing):
        yield facts.p2p.unknown(check, "host", "peer access")
        return
    pairs = list(facts.p2p.gpu_pairs())
    expected = facts.num_gpus * (facts.num_gpus - 1) // 2
    bad: dict[str, list[str]] = {}
    for a, b, state in pairs:
        if state != "OK":
            bad.setdefault(state, []).append(f"{a}-{b}")
    for state, where in bad.items():
        known = state in P2P_STATES and state != "U"
        meaning = P2P_STATES.get(state, "no state that is known")
        yield Finding(
            id=check,
            severity="error" if known else "unknown",
            subject=f"{len(where)} of {expected} GPU pairs",
            reason=f"peer access is {state} ({meaning}) at {', '.join(where[:8])}"
            + (", ..." if len(where) > 8 else "")
            + ": traffic goes through host memory",
            fix="update the driver and BIOS (resizable BAR on, ACS off); consumer GPUs need a "
            "driver with peer access; else expect NCCL to use shared memory",
        )
    if len(pairs) < expected:
        yield Missing(
            f"`nvidia-smi topo -p2p r` shows {len(pairs)} of {expected} pairs", "record it again"
        ).unknown(check, "host", "peer access of the other pairs")
    elif not bad:
        yield Finding(
            id=check,
            severity="ok",
            subject="host",
            reason=f"the driver allows it for all {expected} pairs (that it works is shown only "
            "by a transfer: autotune probe runs one)",
        )


def check_bar(facts: Facts) -> Iterator[Finding]:
    """BAR1 as large as the memory, or peers see only a window of it."""
    check = "bar-size"
    if isinstance(facts.smi, Missing):
        yield facts.smi.unknown(check, "GPUs", "BAR size")
        return
    sized = [g for g in facts.smi.gpus if g.bar1_mib is not None and g.memory_mib is not None]
    small = [g for g in sized if (g.bar1_mib or 0) < (g.memory_mib or 0)]
    for gpu in small:
        tiny = (gpu.bar1_mib or 0) < _SMALL_BAR_MIB
        alone = facts.num_gpus < 2 or facts.nvlink_everywhere
        yield Finding(
            id=check,
            severity="error" if tiny and not alone else "warning",
            subject=gpu.title,
            reason=f"BAR1 is {gpu.bar1_mib:.0f} MiB, the memory {gpu.memory_mib:.0f} MiB: peers "
            "can't map all of it",
            fix="switch on Above 4G Decoding and Resizable BAR in the BIOS; a vendor tool "
            "(displaymodeselector) sets the large BAR on some workstation cards",
        )
    if len(sized) < facts.num_gpus:
        yield Missing(
            f"nvidia-smi shows BAR1 of {len(sized)} of {facts.num_gpus} GPUs", "record it again"
        ).unknown(check, "GPUs", "BAR size of the others")
    elif sized and not small:
        least = min(g.bar1_mib or 0 for g in sized)
        reason = f"BAR1 ({least:.0f} MiB at least) covers the memory of all {len(sized)} GPUs"
        yield Finding(id=check, severity="ok", subject="GPUs", reason=reason)


def check_hmm(facts: Facts) -> Iterator[Finding]:
    """Heterogeneous memory management of the UVM driver; known to break peer access over PCIe."""
    check = "hmm"
    modes = set()
    if isinstance(facts.smi, SmiLog):
        modes = {gpu.addressing_mode for gpu in facts.smi.gpus}
    disabled = facts.system.hmm_disabled if isinstance(facts.system, SystemFacts) else None
    if "HMM" in modes or (disabled is False and modes <= {None}):
        shown = "addressing mode HMM" if "HMM" in modes else "uvm_disable_hmm=N"
        alone = facts.num_gpus < 2 or facts.nvlink_everywhere
        yield Finding(
            id=check,
            severity="info" if alone else "warning",
            subject="host",
            reason=f"HMM is on ({shown}); hosts whose GPUs talk over PCIe have hung with it",
            fix="echo 'options nvidia_uvm uvm_disable_hmm=1' > /etc/modprobe.d/nvidia-uvm.conf, "
            "update-initramfs -u, reboot",
        )
    elif disabled or modes - {None}:
        shown = "uvm_disable_hmm=Y" if disabled else f"addressing mode {modes.pop()}"
        yield Finding(id=check, severity="ok", subject="host", reason=f"HMM is off ({shown})")
    else:
        yield Missing(
            "neither the driver's addressing mode nor uvm_disable_hmm is shown",
            "cat /sys/module/nvidia_uvm/parameters/uvm_disable_hmm",
        ).unknown(check, "host", "HMM")


_PORT_KINDS = ("root", "downstream", "upstream")


def _ports(tree: PciTree) -> list[PciDevice]:
    """Ports above GPUs that can redirect, each once. A switch's uplink has no say in it."""
    found: dict[str, PciDevice] = {}
    for gpu in tree.gpus:
        for device in tree.path(gpu)[1:]:
            if device.port != "upstream":
                found[device.address] = device
    return list(found.values())


def _redirects(port: PciDevice) -> list[str]:
    return [bit for bit in _REDIRECTS if port.acs and port.acs.get(bit)]
