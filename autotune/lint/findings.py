"""What a rule says, and the registry of rules.

A rule is one small function ``(Setup) -> iterator of Hit`` under ``@rule(id, source)``; it states
its condition in the server's rules or the physics. ``source`` names what taught it: a public
report, a server's source, or NCCL's.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from autotune.lint.setup import Setup

Severity = Literal["error", "warning", "info"]
#: worst first
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Hit:
    """One occurrence: how bad, which setting, why with the numbers, and the way out."""

    severity: Severity
    subject: str
    reason: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A hit with the id of its rule and the source that taught the rule."""

    id: str
    severity: Severity
    subject: str
    reason: str
    fix: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


RuleFunction = Callable[["Setup"], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered rule; ``engines`` empty means all."""

    id: str
    source: str
    engines: tuple[str, ...]
    function: RuleFunction

    def findings(self, setup: "Setup") -> Iterator[Finding]:
        """What the rule says about a setup."""
        if self.engines and setup.engine not in self.engines:
            return
        for hit in self.function(setup):
            yield Finding(
                id=self.id,
                severity=hit.severity,
                subject=hit.subject,
                reason=hit.reason,
                fix=hit.fix,
                source=self.source,
            )


RULES: dict[str, Rule] = {}


def rule(id: str, source: str, *engines: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule ``id`` for some engines, or for all."""

    def register(function: RuleFunction) -> RuleFunction:
        assert id not in RULES, id
        RULES[id] = Rule(id, source, engines, function)
        return function

    return register


def error(subject: str, reason: str, fix: str) -> Hit:
    """The server will not start, or gives wrong or dangerous results."""
    return Hit("error", subject, reason, fix)


def warning(subject: str, reason: str, fix: str) -> Hit:
    """Likely slower, or not what was meant."""
    return Hit("warning", subject, reason, fix)


def info(subject: str, reason: str, fix: str = "") -> Hit:
    """Worth knowing when numbers are compared."""
    return Hit("info", subject, reason, fix)
