"""Calibration: the constants with their uncertainty, and how measurements update them.

The fit is maximum a posteriori over all constants at once: each observation is a term (or a sum of
terms) in log ms, priors are normal on each constant's scale, and a Student-t weight keeps one bad
repeat from bending the rest. The covariance is the Laplace approximation at the fit, so a constant
that no observation tells keeps its prior spread, and ``identifiability`` says so.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.collectives import allreduce_constants
from model.constants import Constant, default_constants, from_scale, to_scale
from model.machine import Machine
from model.servers import server_of

Array = NDArray[Any]

MODEL_VERSION = 3
#: key in ``term_residuals`` of cycles that their launches bind, and their relative sd about the
#: host's mode before any was measured: eager steps of one host repeat within 10-18 %
LAUNCHED = "launched"
LAUNCHED_SD = 0.08


@dataclass(frozen=True, eq=False, kw_only=True)
class Calibration:
    """Constants and the covariance of their values on their scales, [K, K]."""

    constants: tuple[Constant, ...]
    covariance: Array
    #: id of the calibration this one updated, None for priors
    parent: str | None
    #: sources of the observations used, oldest first
    used: tuple[str, ...]
    machine_fingerprint: str
    model_version: int = MODEL_VERSION
    #: name of the server whose kernels and host the constants describe, see ``model.servers``
    server: str = "generic"
    #: term of ``StepModel.terms_ms`` -> relative sd of what its formula left out of measurements
    term_residuals: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [constant.name for constant in self.constants]
        if len(set(names)) != len(names):
            raise ValueError(f"calibration names a constant twice: {sorted(names)}")
        if self.covariance.shape != (len(names), len(names)):
            raise ValueError(
                f"covariance is {self.covariance.shape}, but there are {len(names)} constants"
            )

    def __getitem__(self, name: str) -> float:
        return self.constant(name).value

    def constant(self, name: str) -> Constant:
        """A constant by name; raises ``ValueError`` listing the names."""
        for constant in self.constants:
            if constant.name == name:
                return constant
        raise ValueError(f"unknown constant {name!r}; known: {', '.join(self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all constants, in order."""
        return tuple(constant.name for constant in self.constants)

    @cached_property
    def x(self) -> Array:
        """Values on their scales, [K]."""
        return np.array([to_scale(c.value, c.scale) for c in self.constants])

    @cached_property
    def limits(self) -> tuple[Array, Array]:
        """Physical limits of the values on their scales, [K] each; infinite where there is none."""

        def ends(name: str, none: float) -> Array:
            values = [(getattr(c, name), c.scale) for c in self.constants]
            return np.array([to_scale(v, s) if np.isfinite(v) else none for v, s in values])

        return ends("least", -np.inf), ends("most", np.inf)

    @cached_property
    def id(self) -> str:
        """12 hex digits of values, covariance and version."""
        values = [(c.name, f"{c.value:.9g}") for c in self.constants]
        covariance = [f"{v:.6g}" for v in self.covariance.ravel() if v]
        rest = [f"{name} {sd:.6g}" for name, sd in sorted(self.term_residuals.items())]
        about = [self.model_version, self.machine_fingerprint, self.server]
        text = json.dumps([*about, values, covariance, rest])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def residual(self, term: str) -> float:
        """Relative sd of what the formulas leave out of a term: at least that of a whole cycle."""
        return max(self["discrepancy"], self.term_residuals.get(term, 0.0))

    @property
    def launched_residual(self) -> float:
        """Relative sd of what the formulas leave out of a cycle that its launches bind."""
        return max(self["discrepancy"], self.term_residuals.get(LAUNCHED, LAUNCHED_SD))

    def interval(self, name: str) -> tuple[float, float]:
        """90 % posterior interval of a constant, in its unit."""
        k = self.names.index(self.constant(name).name)
        half = 1.6449 * float(np.sqrt(self.covariance[k, k]))
        scale = self.constants[k].scale
        low, high = from_scale(np.array([self.x[k] - half, self.x[k] + half]), scale)
        return float(low), float(high)

    def identifiability(self) -> dict[str, float]:
        """By constant: share of the prior variance the data removed (0: untold, 1: pinned)."""
        variance = np.diag(self.covariance)
        return {
            c.name: float(np.clip(1.0 - variance[k] / c.prior_sd**2, 0.0, 1.0))
            for k, c in enumerate(self.constants)
        }

    def with_values(self, **values: float) -> "Calibration":
        """The same calibration with some constants set (for what-if questions and simulators)."""
        for name in values:
            self.constant(name)
        constants = tuple(
            replace(c, value=float(values[c.name])) if c.name in values else c
            for c in self.constants
        )
        return replace(self, constants=constants, parent=self.id)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``Calibration.from_dict`` restores an equal calibration."""
        return {
            "model_version": self.model_version,
            "id": self.id,
            "parent": self.parent,
            "machine_fingerprint": self.machine_fingerprint,
            "server": self.server,
            "used": list(self.used),
            "constants": [
                {
                    "name": c.name,
                    "value": c.value,
                    "unit": c.unit,
                    "prior": c.prior,
                    "prior_sd": c.prior_sd,
                    "scale": c.scale,
                    "source": c.source,
                    "least": None if np.isinf(c.least) else c.least,
                    "most": None if np.isinf(c.most) else c.most,
                }
                for c in self.constants
            ],
            "covariance": self.covariance.tolist(),
            "term_residuals": dict(self.term_residuals),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Calibration":
        """Restore; raises ``ValueError`` for another model version or a missing key."""
        version = values.get("model_version")
        if version != MODEL_VERSION:
            raise ValueError(
                f"calibration has model_version {version!r}; this is version {MODEL_VERSION}: "
                "calibrate again from the stored measurements"
            )
        try:
            return cls(
                constants=tuple(
                    Constant(**{name: v for name, v in row.items() if v is not None})
                    for row in values["constants"]
                ),
                covariance=np.array(values["covariance"], dtype=float),
                parent=values["parent"],
                used=tuple(values["used"]),
                machine_fingerprint=values["machine_fingerprint"],
                server=values["server"],
                term_residuals=values["term_residuals"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"calibration is not complete: {error}") from error


def default_calibration(machine: Machine, server: str = "generic") -> Calibration:
    """Priors for this machine and server; what the machine's probe measured is used.

    Raises ``ValueError`` for a server that ``model.servers`` does not know.
    """
    known = server_of(server, machine)
    constants = (*default_constants(machine, known), *allreduce_constants(machine))
    calibration = Calibration(
        constants=constants,
        covariance=np.diag([c.prior_sd**2 for c in constants]),
        parent=None,
        used=(),
        machine_fingerprint=machine.fingerprint,
        server=server,
    )
    if not machine.measured.allreduce:
        return calibration
    # only a probed machine needs the fit, and the fit needs this module
    from model.probed import with_probe

    return with_probe(calibration, machine)
