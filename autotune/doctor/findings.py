"""What a check says: one finding each, with the reason and a way out."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

#: "unknown" is said whenever the evidence is missing: a check never passes for want of data
Severity = Literal["error", "warning", "unknown", "info", "ok"]
#: worst first
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "unknown", "info", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check on one thing."""

    #: stable name of the check ("pcie-link", "acs-redirect")
    id: str
    severity: Severity
    #: what was looked at ("GPU 3 (0000:41:00.0)", "root port 0000:40:01.1", "host")
    subject: str
    #: one sentence with the numbers
    reason: str
    #: what to do; empty when nothing is to be done
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a piece of evidence is not there, and how to get it."""

    reason: str
    fix: str = ""

    def unknown(self, check: str, subject: str, what: str) -> Finding:
        """The finding "not checked": ``what`` is what stays unseen."""
        return Finding(
            id=check,
            severity="unknown",
            subject=subject,
            reason=f"{what} not checked: {self.reason}",
            fix=self.fix,
        )


def ordered(findings: list[Finding]) -> list[Finding]:
    """Worst first; within a severity in the order found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def count(findings: list[Finding]) -> dict[str, int]:
    """Number of findings of every severity."""
    return {name: sum(f.severity == name for f in findings) for name in SEVERITIES}
