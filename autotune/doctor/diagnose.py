"""Runs every check on one recording."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autotune.doctor import check_gpu, check_host, check_p2p, check_pcie
from autotune.doctor.facts import Facts, parse
from autotune.doctor.findings import Finding, count, ordered
from autotune.doctor.sources import RECORDED, Recording

Check = Callable[[Facts], Iterator[Finding]]

#: checks that make sense with GPUs only
_GPU_CHECKS: tuple[Check, ...] = (
    check_gpu.check_driver,
    check_pcie.check_links,
    check_p2p.check_acs,
    check_p2p.check_iommu,
    check_p2p.check_peer_access,
    check_p2p.check_bar,
    check_p2p.check_hmm,
    check_pcie.check_aspm,
    check_pcie.check_signals,
    check_gpu.check_gpus,
    check_host.check_numa,
)
_HOST_CHECKS: tuple[Check, ...] = (check_host.check_governor, check_host.check_packages)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, worst first, and what they rest on."""

    origin: str
    findings: tuple[Finding, ...]
    #: names of the recorded files that were there
    seen: tuple[str, ...]
    #: file -> why it was not there
    unseen: dict[str, str]

    @property
    def has_errors(self) -> bool:
        """Whether something is broken."""
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """One object for machines."""
        return {
            "host": self.origin,
            "summary": count(list(self.findings)),
            "findings": [finding.to_json() for finding in self.findings],
            "seen": list(self.seen),
            "unseen": self.unseen,
        }


def diagnose(recording: Recording) -> Diagnosis:
    """Parse, check, sort."""
    facts = parse(recording)
    findings: list[Finding] = []
    if facts.surely_no_gpu:
        findings.append(
            Finding(
                id="gpus",
                severity="info",
                subject="host",
                reason="no NVIDIA GPU on this host: PCIe, peer traffic and GPU state do not apply; "
                "studies run on the CPU",
            )
        )
    else:
        for check in _GPU_CHECKS:
            findings += check(facts)
    for check in _HOST_CHECKS:
        findings += check(facts)
    if recording.ignored:
        findings.append(
            Finding(
                id="recording",
                severity="info",
                subject=recording.origin,
                reason=f"files that no check reads: {', '.join(recording.ignored)}",
            )
        )
    return Diagnosis(
        origin=recording.origin,
        findings=tuple(ordered(findings)),
        seen=tuple(RECORDED[name].file for name in recording.texts),
        unseen={RECORDED[name].file: why.reason for name, why in recording.missing.items()},
    )
