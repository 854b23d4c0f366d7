"""PCIe: generation and width of every link from a GPU to its root port, ASPM, bad signals."""

from collections.abc import Iterator

from autotune.doctor.facts import Facts
from autotune.doctor.findings import Finding, Missing
from autotune.doctor.lspci import LinkRate, PciDevice, PciTree
from autotune.doctor.smi import SmiGpu, SmiLog
from autotune.doctor.system import SystemFacts

_GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_NARROW_FIX = (
    "reseat the card and its riser or cable, clean the contacts, look for a bifurcation or lane "
    "setting of this slot in the BIOS, then try another slot"
)
_SLOW_FIX = (
    "set the slot's PCIe speed to the highest generation (not Auto) in the BIOS; if it falls back, "
    "replace the riser or cable"
)
_REPLAYS_WORTH_A_LOOK = 100


def check_links(facts: Facts) -> Iterator[Finding]:
    """Each GPU's own link, then the links above it, each once."""
    judged: set[str] = set()
    if isinstance(facts.smi, SmiLog):
        for gpu in facts.smi.gpus:
            yield _gpu_link(facts, gpu)
            judged.add(gpu.address)
    yield from _tree_links(facts, judged)
    yield from _presence(facts)


def check_signals(facts: Facts) -> Iterator[Finding]:
    """Correctable errors and replays: a link that works at full speed, but repeats itself."""
    check = "pcie-errors"
    found = False
    if isinstance(facts.smi, SmiLog):
        for gpu in facts.smi.gpus:
            if gpu.replays is not None and gpu.replays >= _REPLAYS_WORTH_A_LOOK:
                found = True
                yield Finding(
                    id=check,
                    severity="warning",
                    subject=gpu.title,
                    reason=f"{gpu.replays:.0f} PCIe packets were sent again (replay counter)",
                    fix="reseat the card, replace the riser or cable; watch whether it still grows",
                )
    if isinstance(facts.pci, Missing):
        yield facts.pci.unknown(check, "host", "PCIe error bits")
        return
    for device, gpus in _above_gpus(facts.pci):
        if device.signal_errors:
            found = True
            yield Finding(
                id=check,
                severity="warning",
                subject=device.title,
                reason=f"correctable errors are noted ({', '.join(device.signal_errors)}), {gpus}",
                fix="reseat or replace the riser, cable or card below it; clear the bits with "
                "`setpci` and see whether they come back",
            )
    if facts.pci.denied:
        yield _denied(check, "PCIe error bits")
    elif not found and facts.pci.gpus:
        seen = sum(device.signal_errors is not None for device, _ in _above_gpus(facts.pci))
        yield _all_seen(facts, check, "PCIe error bits", seen, "no errors noted")


def check_aspm(facts: Facts) -> Iterator[Finding]:
    """Active-state power management on the way to a GPU: it adds microseconds to small messages."""
    check = "aspm"
    fix = (
        "add pcie_aspm=off pcie_port_pm=off to the kernel command line, or "
        "`echo performance > /sys/module/pcie_aspm/parameters/policy`"
    )
    if isinstance(facts.system, SystemFacts) and facts.system.aspm_policy in (
        "powersave",
        "powersupersave",
    ):
        policy = facts.system.aspm_policy
        reason = f"the kernel's ASPM policy is {policy}"
        yield Finding(id=check, severity="warning", subject="host", reason=reason, fix=fix)
    if isinstance(facts.pci, Missing):
        yield facts.pci.unknown(check, "host", "ASPM of the GPU paths")
        return
    if facts.pci.denied:
        yield _denied(check, "ASPM of the GPU paths")
        return
    on = [(device, gpus) for device, gpus in _above_gpus(facts.pci) if device.aspm]
    for device, gpus in on:
        yield Finding(
            id=check,
            severity="warning",
            subject=device.title,
            reason=f"ASPM {device.aspm} is enabled, {gpus}",
            fix=fix,
        )
    if not on and facts.pci.gpus:
        seen = sum(device.aspm is not None for device, _ in _above_gpus(facts.pci))
        yield _all_seen(facts, check, "ASPM of the GPU paths", seen, "disabled")


def _gpu_link(facts: Facts, gpu: SmiGpu) -> Finding:
    """A GPU's link as the driver, sysfs or lspci (in this order) shows it."""
    now, most = gpu.link, gpu.link_max
    source, idle = "nvidia-smi", gpu.idle
    if isinstance(facts.smi_load, SmiLog):
        busy = next((g for g in facts.smi_load.gpus if g.address == gpu.address), None)
        if busy is not None and busy.link is not None:
            now, source, idle = busy.link, "nvidia-smi, while copying", False
    if (now is None or most is None) and isinstance(facts.system, SystemFacts):
        device = facts.system.pci.get(gpu.address)
        if device is not None:
            now, most, source = device.current, device.maximum, "/sys"
    if (now is None or most is None) and isinstance(facts.pci, PciTree):
        listed = facts.pci.by_address.get(gpu.address)
        if listed is not None:
            now, most, source = listed.current, listed.capable, "lspci"
    if now is None or most is None:
        missing = Missing(
            "the driver shows no link (a virtual machine may hide it)",
            "run the doctor on the host itself",
        )
        return missing.unknown("pcie-link", gpu.title, "generation and width")
    card = gpu.gen_max_device
    hint = ""
    if card is not None and gpu.gen_max_host and gpu.gen_max_host < card:
        hint = f"; the card can Gen{card}, its port Gen{gpu.gen_max_host} at most"
    return _judge(gpu.title, now, most, idle=idle, source=source, hint=hint)


def _judge(
    subject: str,
    now: LinkRate,
    most: LinkRate,
    *,
    idle: bool | None,
    source: str,
    hint: str = "",
    check: str = "pcie-link",
) -> Finding:
    """Compare a link with what both ends can; a slow link of an idle GPU proves nothing."""

    def finding(severity: str, reason: str, fix: str = "") -> Finding:
        return Finding(
            id=check,
            severity=severity,  # type: ignore[arg-type]
            subject=subject,
            reason=f"{reason}{hint} ({source})",
            fix=fix,
        )

    rate = f"{_gb(now):.1f} of {_gb(most):.1f} GB/s per direction"
    if now.width == 0:
        return finding("error", f"the link is down, {most} is possible", _NARROW_FIX)
    if now.width < most.width:
        reason = f"runs at {now}, {most} is possible: {rate}"
        slow = now.gen < most.gen
        return finding("error", reason, f"{_NARROW_FIX}; {_SLOW_FIX}" if slow else _NARROW_FIX)
    if now.gen < most.gen:
        if idle is not False:
            why = "the GPU is idle" if idle else "whether the GPU is idle is not known"
            return finding(
                "unknown",
                f"{now} now, {most} is possible; {why}, and an idle GPU lowers its link on purpose",
                "run the doctor again while the GPU works (where torch has CUDA it makes the GPU "
                "work by itself)",
            )
        return finding("error", f"runs at {now}, {most} is possible: {rate}", _SLOW_FIX)
    if hint:
        return finding("warning", f"{now}", "move the card to a faster slot, if there is one")
    return finding("ok", f"{now}, the maximum")


def _tree_links(facts: Facts, judged: set[str]) -> Iterator[Finding]:
    """Links by lspci: the GPU's own when the driver did not show it, and those above."""
    check = "pcie-path"
    if isinstance(facts.pci, Missing):
        if isinstance(facts.system, SystemFacts) and facts.system.gpus:
            yield from _sysfs_links(facts.system, judged)
        yield facts.pci.unknown(check, "host", "links of switches and root ports")
        return
    idle = {}
    if isinstance(facts.smi, SmiLog):
        idle = {gpu.address: gpu.idle for gpu in facts.smi.gpus}
    if facts.pci.denied:
        yield _denied(check, "links of switches and root ports")
        return
    done: set[str] = set()
    num_ok = 0
    for gpu in facts.pci.gpus:
        path = facts.pci.path(gpu)
        if gpu.dead:
            yield _dead(gpu)
            continue
        if len(path) == 1 or path[-1].port not in ("root", None):
            yield _no_root(gpu, path, facts)
        for lower, upper in facts.pci.links(gpu):
            if lower.address in done:
                continue
            done.add(lower.address)
            is_gpu = lower is gpu
            if is_gpu and gpu.address in judged:
                continue
            now = lower.current or upper.current
            most = _both(lower.capable, upper.capable)
            if now is None or most is None:
                what = "generation and width"
                cut = Missing("lspci shows none" + (" (the text is cut)" if lower.cut else ""))
                yield cut.unknown("pcie-link" if is_gpu else check, lower.title, what)
                continue
            subject = lower.title if is_gpu else f"{lower.title} below {upper.title}"
            found = _judge(
                subject,
                now,
                most,
                # only a GPU slows its link down to save power
                idle=idle.get(gpu.address) if is_gpu else False,
                source="lspci",
                hint=_target(lower, upper, most),
                check="pcie-link" if is_gpu else check,
            )
            if is_gpu or found.severity != "ok":
                yield found
            else:
                num_ok += 1
    if num_ok:
        reason = f"{num_ok} links of switches run at their maximum"
        yield Finding(id=check, severity="ok", subject="host", reason=reason)


def _sysfs_links(system: SystemFacts, judged: set[str]) -> Iterator[Finding]:
    for device in system.gpus:
        if device.address in judged or device.current is None or device.maximum is None:
            continue
        subject = f"GPU {device.address}"
        yield _judge(subject, device.current, device.maximum, idle=None, source="/sys")


def _presence(facts: Facts) -> Iterator[Finding]:
    """GPUs that one piece of evidence shows and another lacks."""
    if not isinstance(facts.smi, SmiLog):
        return
    driver = {gpu.address for gpu in facts.smi.gpus}
    if facts.smi.cut or (facts.smi.attached or 0) > len(driver):
        yield Missing(
            f"the nvidia-smi output is cut: {len(driver)} of {facts.smi.attached or '?'} GPUs",
            "record it again",
        ).unknown("gpu-present", "host", "the other GPUs")
    if not isinstance(facts.pci, PciTree):
        return
    for gpu in facts.pci.gpus:
        if gpu.address not in driver and not gpu.dead and not facts.smi.cut:
            yield Finding(
                id="gpu-present",
                severity="error",
                subject=f"GPU {gpu.address}",
                reason="it is on the PCIe bus, but the driver does not show it",
                fix="look for NVRM and Xid lines in `dmesg`; reset or reboot; check that no VM or "
                "vfio-pci holds it",
            )
    listed = {gpu.address for gpu in facts.pci.gpus}
    for shown in facts.smi.gpus:
        if shown.address not in listed:
            reason = "lspci does not list it (its output may be cut)"
            yield Missing(reason, "record lspci again").unknown(
                "pcie-path", shown.title, "the path to its root port"
            )


def _dead(gpu: PciDevice) -> Finding:
    return Finding(
        id="gpu-present",
        severity="error",
        subject=f"GPU {gpu.address}",
        reason="it fell off the bus: its configuration space reads as all ones (rev ff)",
        fix="power-cycle the host (a reboot may not be enough); check power cables and "
        "temperature, and `dmesg` for Xid 79",
    )


def _no_root(gpu: PciDevice, path: tuple[PciDevice, ...], facts: Facts) -> Finding:
    why = "a virtual machine hides it" if facts.virtual else "a virtual machine, or a cut text"
    return Missing(
        f"no root port is listed above {path[-1].address} ({why})",
        "run the doctor on the host itself, as root",
    ).unknown("pcie-path", f"GPU {gpu.address}", "the path to its root port")


def _all_seen(facts: Facts, check: str, what: str, num_seen: int, verdict: str) -> Finding:
    """OK only when every device on every path, up to a root port, showed the value."""
    tree = facts.pci
    assert isinstance(tree, PciTree)
    if facts.unlisted is not None:
        return facts.unlisted.unknown(check, "host", what)
    devices = _above_gpus(tree)
    if num_seen == len(devices) and all(tree.path(gpu)[-1].port == "root" for gpu in tree.gpus):
        reason = f"{verdict} on all {num_seen} devices on GPU paths"
        return Finding(id=check, severity="ok", subject="host", reason=reason)
    return Missing(
        f"shown by {num_seen} of {len(devices)} devices listed, and not all paths reach a root port"
        if num_seen == len(devices)
        else f"shown by {num_seen} of {len(devices)} devices",
        "run the doctor on the host itself, as root",
    ).unknown(check, "host", what)


def _denied(check: str, what: str) -> Finding:
    return Missing(
        "lspci was not allowed to read the capabilities (<access denied>)", "run as root (sudo)"
    ).unknown(check, "host", what)


def _above_gpus(tree: PciTree) -> list[tuple[PciDevice, str]]:
    """Every device on a GPU's path, once, with the GPUs it serves."""
    serves: dict[str, list[str]] = {}
    for gpu in tree.gpus:
        for device in tree.path(gpu):
            serves.setdefault(device.address, []).append(gpu.address)
    found = []
    for address, gpus in serves.items():
        device = tree.by_address[address]
        own = device.is_nvidia_gpu
        found.append((device, "the GPU itself" if own else f"above {', '.join(gpus)}"))
    return found


def _both(lower: LinkRate | None, upper: LinkRate | None) -> LinkRate | None:
    """What a link can: the lesser of its two ends; one end is enough to know a bound."""
    ends = [end for end in (lower, upper) if end is not None]
    if not ends:
        return None
    return LinkRate(min(end.gen for end in ends), min(end.width for end in ends))


def _target(lower: PciDevice, upper: PciDevice, most: LinkRate) -> str:
    for device in (upper, lower):
        if device.target_gen is not None and device.target_gen < most.gen:
            return f"; the target speed of {device.address} is set to Gen{device.target_gen}"
    return ""


def _gb(rate: LinkRate) -> float:
    return _GB_PER_LANE[rate.gen] * rate.width
