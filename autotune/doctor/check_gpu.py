"""State of the GPUs: power, clocks, errors, other users, driver settings."""

from collections.abc import Iterator

from autotune.doctor.facts import Facts
from autotune.doctor.findings import Finding, Missing, Severity
from autotune.doctor.smi import SmiGpu, SmiLog

#: states of rest and settings that somebody chose, in nvidia-smi's names
_HARMLESS = (
    "gpu_idle",
    "applications_clocks_setting",
    "display_clocks_setting",
    "display_clock_setting",
)
_SEVERE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_REASON_TEXT = {
    "hw_slowdown": "the hardware slows the clocks down",
    "hw_thermal_slowdown": "the hardware slows the clocks down, it is too hot",
    "hw_power_brake_slowdown": "the power brake is pulled (the chassis lacks power)",
    "sw_thermal_slowdown": "the driver slows the clocks down, it is too hot",
    "sw_power_cap": "the power limit holds the clocks down",
    "sync_boost": "it waits for the slowest GPU of a sync-boost group",
}
#: memory in use without a process that could be seen, MiB; the driver itself takes a few hundred
_UNSEEN_MIB = 1500.0


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Everything that one GPU's section tells; one line each, then one for what is fine."""
    if isinstance(facts.smi, Missing):
        yield facts.smi.unknown("gpu-state", "GPUs", "power, clocks, processes, persistence")
        return
    if not facts.smi.gpus:
        yield Missing("nvidia-smi lists no GPU").unknown("gpu-state", "GPUs", "their state")
        return
    for gpu in facts.smi.gpus:
        found = [
            *_power(gpu),
            *_throttling(gpu),
            *_processes(gpu),
            *_settings(gpu),
            *_errors(gpu),
        ]
        yield from found
        if not any(finding.severity in ("error", "warning", "unknown") for finding in found):
            yield Finding(
                id="gpu-state",
                severity="ok",
                subject=gpu.title,
                reason=f"{gpu.name}: power limit {_watts(gpu.power_limit_w)}, no throttling, no "
                "other process, persistence on",
            )


def _power(gpu: SmiGpu) -> Iterator[Finding]:
    limit, default = gpu.power_limit_w, gpu.power_default_w
    if limit is None or default is None:
        missing = Missing("the driver shows no power limit")
        yield missing.unknown("power-cap", gpu.title, "power limit")
    elif limit < default - 0.5:
        yield Finding(
            id="power-cap",
            severity="warning",
            subject=gpu.title,
            reason=f"power limit {limit:.0f} W is {1 - limit / default:.0%} below the default of "
            f"{default:.0f} W",
            fix=f"nvidia-smi -i {gpu.index} -pl {default:.0f} (unless the cap is wanted)",
        )


def _throttling(gpu: SmiGpu) -> Iterator[Finding]:
    if gpu.reasons is None:
        missing = Missing("the driver shows no clock event reasons")
        yield missing.unknown("throttling", gpu.title, "throttling")
        return
    for reason in gpu.reasons:
        if reason in _HARMLESS:
            continue
        severity: Severity = "error" if reason in _SEVERE else "warning"
        heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c:.0f} °C"
        yield Finding(
            id="throttling",
            severity=severity,
            subject=gpu.title,
            reason=f"{reason}: {_REASON_TEXT.get(reason, 'the clocks are held down')}{heat}",
            fix="check airflow and fans"
            if "thermal" in reason
            else "check power supplies and cables"
            if "brake" in reason or reason == "hw_slowdown"
            else "raise the power limit, or measure knowing that it binds",
        )


def _processes(gpu: SmiGpu) -> Iterator[Finding]:
    others = [p for p in gpu.processes or () if "C" in p.kind]
    used = gpu.memory_used_mib
    if others:
        listed = ", ".join(
            f"{p.name.rsplit('/', 1)[-1]} (pid {p.pid}"
            + (")" if p.used_mib is None else f", {p.used_mib:.0f} MiB)")
            for p in others[:4]
        )
        yield Finding(
            id="gpu-busy",
            severity="warning",
            subject=gpu.title,
            reason=f"{len(others)} other process(es) compute on it: {listed}",
            fix="stop them before measuring: what they take is not in any prediction",
        )
    elif used is not None and used > _UNSEEN_MIB:
        yield Finding(
            id="gpu-busy",
            severity="warning",
            subject=gpu.title,
            reason=f"{used:.0f} MiB are in use, but no process is shown (another container?)",
            fix="run `nvidia-smi` on the host, outside containers, and stop what holds the memory",
        )
    elif gpu.processes is None and used is None:
        missing = Missing("the driver shows neither processes nor used memory")
        yield missing.unknown("gpu-busy", gpu.title, "other users")


def _settings(gpu: SmiGpu) -> Iterator[Finding]:
    if gpu.persistence is False:
        yield Finding(
            id="persistence",
            severity="warning",
            subject=gpu.title,
            reason="persistence mode is off: the driver is torn down between processes, the first "
            "start is slow and settings are lost",
            fix="systemctl enable --now nvidia-persistenced (or nvidia-smi -pm 1)",
        )
    elif gpu.persistence is None:
        missing = Missing("the driver does not show it")
        yield missing.unknown("persistence", gpu.title, "persistence mode")
    if gpu.mig:
        yield Finding(
            id="mig",
            severity="warning",
            subject=gpu.title,
            reason="MIG is on: NCCL has no peer access between instances",
            fix=f"nvidia-smi -i {gpu.index} -mig 0",
        )
    if gpu.compute_mode == "Prohibited":
        yield Finding(
            id="compute-mode",
            severity="error",
            subject=gpu.title,
            reason="compute mode Prohibited: no CUDA context can be made",
            fix=f"nvidia-smi -i {gpu.index} -c 0",
        )


def _errors(gpu: SmiGpu) -> Iterator[Finding]:
    if gpu.uncorrectable_errors:
        yield Finding(
            id="memory-errors",
            severity="error",
            subject=gpu.title,
            reason=f"{gpu.uncorrectable_errors:.0f} uncorrectable memory errors since the driver "
            "was loaded",
            fix="drain and reset the GPU (nvidia-smi -r), then run the vendor's field diagnostic",
        )
    if gpu.remap_pending:
        yield Finding(
            id="memory-errors",
            severity="warning",
            subject=gpu.title,
            reason="a row remapping is pending",
            fix="reset the GPU (nvidia-smi -r) or reboot, so that the row is replaced",
        )


def check_driver(facts: Facts) -> Iterator[Finding]:
    """The driver answers, and for every GPU on the bus."""
    if isinstance(facts.smi, SmiLog):
        if facts.smi.gpus:
            names: dict[str, int] = {}
            for gpu in facts.smi.gpus:
                names[gpu.name] = names.get(gpu.name, 0) + 1
            listed = ", ".join(f"{count} x {name}" for name, count in names.items())
            reason = f"{listed}; driver {facts.smi.driver}, CUDA {facts.smi.cuda}"
            severity: Severity = "ok" if len(names) == 1 else "warning"
            yield Finding(
                id="gpus",
                severity=severity,
                subject="host",
                reason=reason,
                fix=""
                if len(names) == 1
                else "tensor parallelism runs at the pace of the slowest kind: use equal GPUs "
                "(CUDA_VISIBLE_DEVICES)",
            )
        return
    if facts.num_gpus:
        failed = "NVIDIA-SMI has failed" in facts.smi.reason
        yield Finding(
            id="driver",
            severity="error" if facts.live or failed else "unknown",
            subject="host",
            reason=f"{facts.num_gpus} NVIDIA GPU(s) are there, but the driver tells nothing: "
            f"{facts.smi.reason}",
            fix=facts.smi.fix or "reinstall the driver; `dmesg | grep NVRM` says why it fails",
        )


def _watts(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} W"
