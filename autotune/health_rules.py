"""Rules on what a run shows of its own health; ``autotune lint`` asks the same of a server's log.

Judgements of single numbers (``wiring_fault``, ``not_started``, ``spins``) are plain functions with
their limits beside them, so that every reader of such numbers shares one rule. ``watch_repeats``
applies them, and a watch on clocks and temperature, to stored repeats.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from autotune.records import Acceptance, Health, Measurement

#: a first position that is alive (published heads: 0.48 to 0.83 a step)
ALIVE_RATE = 0.2
#: conditional acceptance that no working chain shows
FAULT_RATE = 0.05
#: fewer verifies that reach a depth tell nothing about it
MIN_REACHED = 20
#: accept length that rounds to 1.00
STARTED_LENGTH = 1.005
#: share of the power limit, and watts without a known limit, below which a busy GPU does no work
SPIN_POWER_SHARE, SPIN_POWER_W = 0.35, 150.0
SPIN_UTILIZATION_PERCENT = 95.0
#: busy readings, and their share of all, below which they were caught by chance: a run of a small
#: model on two H200 showed 2 in 116
_MIN_BUSY, _MIN_BUSY_SHARE = 4, 0.25
#: clocks that sink by more than this between the first and last third of a run
CLOCK_DROP = 0.02
#: temperature that rises by more than this alongside
TEMPERATURE_RISE_C = 5.0
_MIN_WATCHED = 6

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """What a rule found; the ids are those of the lint rules on logs where they ask the same."""

    id: str
    severity: Severity
    subject: str
    reason: str
    fix: str


def wiring_fault(cumulative: Sequence[float]) -> tuple[int, float] | None:
    """Depth (from 0) at which a chain that began well suddenly accepts next to nothing.

    ``cumulative``: share of verifies whose accepted path reaches each depth. Returns the depth and
    the conditional acceptance there, or None. A chain falls off gently, 0.5 to 0.8 a step; a fall
    to about 0 after a good position means that the draft's next pass gets wrong inputs.
    """
    for depth in range(1, len(cumulative)):
        before = cumulative[depth - 1]
        if before < ALIVE_RATE:
            return None
        conditional = cumulative[depth] / before
        if conditional < FAULT_RATE:
            return depth, conditional
    return None


def not_started(accept_lengths: Sequence[float]) -> bool:
    """Whether every accept length is 1.00: not one draft was accepted."""
    return bool(accept_lengths) and all(length <= STARTED_LENGTH for length in accept_lengths)


def spins(utilization_percent: float, power_w: float, power_limit_w: float | None) -> bool:
    """Whether a GPU is fully busy at idle power: a kernel waits for a peer instead of working."""
    limit = SPIN_POWER_W if power_limit_w is None else SPIN_POWER_SHARE * power_limit_w
    return utilization_percent >= SPIN_UTILIZATION_PERCENT and power_w < limit


def watch_repeats(records: "Sequence[Measurement]") -> Iterator[HealthFinding]:
    """Everything that repeats, in the order taken, show about speculation and the host."""
    yield from _speculation(records)
    yield from _spinning(records)
    yield from _throttling(records)
    yield from _clocks(records)


def _speculation(records: "Sequence[Measurement]") -> Iterator[HealthFinding]:
    by_knobs: dict[str, list[Acceptance]] = {}
    for record in records:
        # greedy plain decoding has no acceptance at all
        if record.acceptance is not None and record.acceptance.num_verifies > 0:
            by_knobs.setdefault(record.knobs_id, []).append(record.acceptance)
    for knobs_id, counts in by_knobs.items():
        verifies = sum(one.num_verifies for one in counts)
        drafted = sum(one.num_drafted for one in counts)
        if drafted == 0 or verifies < MIN_REACHED:
            continue
        lengths = [1 + one.num_accepted / one.num_verifies for one in counts]
        if not_started(lengths):
            yield HealthFinding(
                "log-spec-not-started",
                "error",
                f"accept length 1.00 (knobs {knobs_id})",
                f"not one of {drafted} drafts was accepted in {verifies} verifies: speculation did "
                f"not start (draft not loaded, not fed, or its tokens mapped wrongly)",
                "check that the draft belongs to this target; do not tune steps",
            )
            continue
        depths = max(len(one.accepted_by_depth) for one in counts)
        reached = [
            sum(c.accepted_by_depth[d] for c in counts if d < len(c.accepted_by_depth))
            for d in range(depths)
        ]
        fault = wiring_fault([count / verifies for count in reached])
        if fault is not None and reached[fault[0] - 1] >= MIN_REACHED:
            depth, conditional = fault
            yield HealthFinding(
                "log-wiring-fault",
                "error",
                f"acceptance by depth (knobs {knobs_id})",
                f"draft {depth} is accepted {reached[depth - 1]} times in {verifies} verifies, "
                f"draft {depth + 1} after it at {conditional:.2f}: a working chain keeps 0.5 to "
                f"0.8 a step, so the draft's next pass gets wrong inputs (hidden states, "
                f"positions or KV)",
                "a wiring fault of draft and engine, no tuning result; one draft step meanwhile",
            )


def _spinning(records: "Sequence[Measurement]") -> Iterator[HealthFinding]:
    """GPUs that wait for a peer: the rule of most readings, and of a repeat that hung."""
    readings, busy, low = 0, 0, []
    for record in records:
        for states in (record.health_before, record.health_after):
            # one GPU has no peer to wait for: it is only short of work
            if sum(health.power_w is not None for health in states) < 2:
                continue
            for health in states:
                used, power = health.utilization_percent, health.power_w
                if used is None or power is None:
                    continue
                readings += 1
                if used < SPIN_UTILIZATION_PERCENT:
                    continue
                busy += 1
                if spins(used, power, health.power_limit_w):
                    low.append((record, health))
    hung = [(r, h) for r, h in low if r.failure is not None and r.failure.kind == "hang"]
    common = busy >= max(_MIN_BUSY, _MIN_BUSY_SHARE * readings) and len(low) * 2 >= busy
    if not hung and not common:
        return
    record, health = (hung or low)[0]
    yield HealthFinding(
        "log-spin",
        "error" if hung else "warning",
        f"{health.device}: {health.utilization_percent:.0f} % busy at {health.power_w:.0f} W "
        f"(repeat {record.order})",
        f"{len(low)} of {busy} busy readings draw next to nothing: kernels "
        + (
            "wait for a peer instead of working: the hang is in a peer wait"
            if hung
            else "wait for a peer, or are too small to fill the GPU"
        ),
        "`autotune doctor` for IOMMU/ACS, `autotune probe` for the all-reduce; "
        "NCCL_P2P_DISABLE=1 separates the causes",
    )


def _throttling(records: "Sequence[Measurement]") -> Iterator[HealthFinding]:
    # lint asks the rules of single numbers, without a host to read
    from autotune.health import UNHEALTHY_REASONS

    seen: dict[tuple[str, str], int] = {}
    for record in records:
        pairs = {
            (health.device, reason)
            for health in (*record.health_before, *record.health_after)
            for reason in health.throttle_reasons
            if reason in UNHEALTHY_REASONS
        }
        for pair in pairs:
            seen[pair] = seen.get(pair, 0) + 1
    for (device, reason), count in sorted(seen.items()):
        yield HealthFinding(
            "run-throttled",
            "error",
            f"{device}: {reason}",
            f"seen around {count} of {len(records)} repeats: they say more about cooling or power "
            f"than about the knobs",
            "cool the host or lower the power limit until it holds, then measure again",
        )


def _clocks(records: "Sequence[Measurement]") -> Iterator[HealthFinding]:
    """Clocks that sink through a run, with or without heat.

    A lower last third alone is common in clocks that jump (CPU governors, boost and idle): the
    readings must also have a trend by the test that repeats are judged by.
    """
    readings: dict[str, list[Health]] = {}
    for record in records:
        for health in record.health_after:
            readings.setdefault(health.device, []).append(health)
    for device, row in sorted(readings.items()):
        clocks = [health.clock_mhz for health in row if health.clock_mhz]
        if len(clocks) < _MIN_WATCHED:
            continue
        first, last = _thirds(clocks)
        if last >= first * (1 - CLOCK_DROP) or not _trend(clocks):
            continue
        heats = [health.temperature_c for health in row if health.temperature_c is not None]
        warmer = _thirds(heats)[1] - _thirds(heats)[0] if len(heats) >= _MIN_WATCHED else 0.0
        heat = f" while it got {warmer:.0f} °C warmer" if warmer > TEMPERATURE_RISE_C else ""
        yield HealthFinding(
            "run-clock-drift",
            "warning",
            f"{device}: {first:.0f} to {last:.0f} MHz",
            f"the clock sank by {100 * (1 - last / first):.1f} % from the first third of the "
            f"repeats to the last{heat}: later repeats are slower for that alone",
            "compare in turns only (`autotune compare`), or lock the clocks (nvidia-smi -lgc)",
        )


def _trend(values: Sequence[float]) -> bool:
    # here, because numpy takes longer to import than the rules on logs, which need none of it
    import numpy as np

    from autotune.patterns import drifts

    return drifts(np.asarray(values, dtype=float))


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return statistics.median(values[:third]), statistics.median(values[-third:])
