"""State of the devices at one moment: clocks, temperature, power, throttling, host load.

GPUs are read through ``nvidia-smi --query-gpu``; a host without it reports its CPU. A value that
the source does not give is None, never zero.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from autotune.records import Health

#: runs a command, returns its stdout, or None when it is missing or fails
RunCommand = Callable[[Sequence[str]], str | None]

COMMAND_TIMEOUT_S = 20.0

#: fields asked of nvidia-smi, in order; names as ``nvidia-smi --help-query-gpu`` lists them
GPU_FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "utilization.gpu",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
#: bit mask of active reasons; the first name since driver 535, the second before
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")

#: bits of the mask (nvml.h, nvmlClocksEventReason*)
_REASONS = (
    (0x001, "gpu_idle"),
    (0x002, "applications_clocks_setting"),
    (0x004, "sw_power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "sw_thermal_slowdown"),
    (0x040, "hw_thermal_slowdown"),
    (0x080, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
#: reasons that make a repeat say more about cooling or supply than about its knobs; a software
#: power cap is not among them: many hosts run at their cap all day
UNHEALTHY_REASONS = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One line of the nvidia-smi query; None where the driver answers N/A."""

    index: int
    name: str
    uuid: str
    driver: str
    memory_mib: float | None
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    power_limit_w: float | None
    #: share of the last sample period (1/6 to 1 s) in which a kernel ran
    utilization_percent: float | None
    pcie_gen: int | None
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    throttle_reasons: tuple[str, ...]

    def health(self) -> Health:
        """The part that changes from minute to minute."""
        return Health(
            device=f"gpu{self.index}",
            clock_mhz=self.sm_clock_mhz,
            temperature_c=self.temperature_c,
            power_w=self.power_w,
            power_limit_w=self.power_limit_w,
            utilization_percent=self.utilization_percent,
            throttle_reasons=self.throttle_reasons,
            load_average=os.getloadavg()[0],
        )


def run_command(command: Sequence[str]) -> str | None:
    """Stdout of ``command``, or None when it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout if done.returncode == 0 else None


def unhealthy(before: Sequence[Health], after: Sequence[Health]) -> str | None:
    """What slowed a device down around a repeat, in one line, or None."""
    found = {
        f"{health.device}: {reason}"
        for health in (*before, *after)
        for reason in health.throttle_reasons
        if reason in UNHEALTHY_REASONS
    }
    return ", ".join(sorted(found)) or None


def query_gpus(run: RunCommand = run_command) -> tuple[GpuState, ...] | None:
    """The GPUs that this process may use, in nvidia-smi's order; None when it is absent or fails.

    CUDA_VISIBLE_DEVICES limits them: what another job's GPU does is not our health.
    """
    for reasons in REASON_FIELDS:
        fields = ",".join((*GPU_FIELDS, reasons))
        text = run(("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"))
        if text is not None:
            return _visible(parse_gpu_query(text), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return None


def _visible(states: tuple[GpuState, ...], listed: str | None) -> tuple[GpuState, ...]:
    """Those that CUDA_VISIBLE_DEVICES lists, by index or by the beginning of the UUID."""
    if listed is None:
        return states
    wanted = [entry.strip() for entry in listed.split(",") if entry.strip()]
    return tuple(
        state
        for state in states
        if any(
            entry == str(state.index) or (not entry.isdigit() and state.uuid.startswith(entry))
            for entry in wanted
        )
    )


def parse_gpu_query(text: str) -> tuple[GpuState, ...]:
    """Parse the csv answer to ``GPU_FIELDS`` plus one reasons mask.

    Raises ``ValueError`` naming a line with another number of fields.
    """
    states = []
    for line in text.splitlines():
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_FIELDS) + 1:
            raise ValueError(
                f"nvidia-smi line has {len(cells)} fields, {len(GPU_FIELDS) + 1} asked: {line!r}"
            )
        numbers = [_number(cell) for cell in cells]
        states.append(
            GpuState(
                index=int(cells[0]),
                name=cells[1],
                uuid=cells[2],
                driver=cells[3],
                memory_mib=numbers[4],
                sm_clock_mhz=numbers[5],
                max_sm_clock_mhz=numbers[6],
                memory_clock_mhz=numbers[7],
                temperature_c=numbers[8],
                power_w=numbers[9],
                power_limit_w=numbers[10],
                utilization_percent=numbers[11],
                pcie_gen=_whole(numbers[12]),
                pcie_gen_max=_whole(numbers[13]),
                pcie_width=_whole(numbers[14]),
                pcie_width_max=_whole(numbers[15]),
                throttle_reasons=decode_reasons(cells[16]),
            )
        )
    return tuple(states)


def decode_reasons(mask: str) -> tuple[str, ...]:
    """Names of the bits set in nvidia-smi's mask; an unknown bit is named by its value."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return ()
    names = [name for bit, name in _REASONS if bits & bit]
    rest = bits & ~sum(bit for bit, _ in _REASONS)
    return (*names, f"unknown_{rest:#x}") if rest else tuple(names)


def snapshot(device: str, run: RunCommand = run_command) -> tuple[Health, ...]:
    """Health now of what a measurement on ``device`` ("cuda" or "cpu") uses."""
    if device == "cuda":
        states = query_gpus(run)
        if states:
            return tuple(state.health() for state in states)
    return (cpu_health(),)


def cpu_health() -> Health:
    """Load, mean clock and hottest sensor of the host CPU, as far as the system tells."""
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    readings = [reading.current for chip in sensors.values() for reading in chip]
    return Health(
        device="cpu",
        # a virtual machine often reports 0
        clock_mhz=round(frequency.current, 1) if frequency and frequency.current else None,
        temperature_c=max(readings) if readings else None,
        load_average=os.getloadavg()[0],
    )


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
