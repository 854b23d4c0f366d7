"""``autotune model show``: every constant with unit, prior, posterior, source, identifiability."""

from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError
from autotune.store.store import Store
from model.calibration import Calibration, default_calibration
from model.constants import from_scale, to_scale
from model.intervals import Z90
from model.machine import Machine

#: share of the prior variance that the data must remove for a constant to count as told
TOLD = 0.5
_SLIGHTLY = 0.1


@dataclass(frozen=True, slots=True)
class Shown:
    """A calibration and where it comes from."""

    origin: str
    calibration: Calibration

    def rows(self) -> list[dict[str, Any]]:
        """One mapping per constant; intervals are 90 %."""
        told = self.calibration.identifiability()
        rows = []
        for constant in self.calibration.constants:
            centre = to_scale(constant.prior, constant.scale)
            low, high = (
                float(from_scale(centre + sign * Z90 * constant.prior_sd, constant.scale))
                for sign in (-1, 1)
            )
            rows.append(
                {
                    "name": constant.name,
                    "value": constant.value,
                    "unit": constant.unit,
                    "posterior90": list(self.calibration.interval(constant.name)),
                    "prior": constant.prior,
                    "prior90": [low, high],
                    "identifiability": told[constant.name],
                    "told_by_data": _told(told[constant.name]),
                    "source": constant.source,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        calibration = self.calibration
        return {
            "origin": self.origin,
            "calibration": calibration.id,
            "parent": calibration.parent,
            "model_version": calibration.model_version,
            "machine_fingerprint": calibration.machine_fingerprint,
            "measurements_used": list(calibration.used),
            "constants": self.rows(),
        }


def machine_constants(machine: Machine) -> Shown:
    """The constants before any study: priors, with what the machine's probe measured."""
    return Shown(f"machine {machine.name}", default_calibration(machine))


def study_constants(store: Store, name: str | None) -> Shown:
    """The newest calibration of a study (the newest study without a name).

    Raises ``UserError`` when there is no such study or nothing was calibrated yet.
    """
    views = store.studies()
    if name is None and not views:
        raise UserError("the database holds no study; give --machine FILE, or --database")
    view = store.study(name) if name is not None else views[-1]
    records = store.calibrations(view.id)
    if records:
        try:
            newest = Calibration.from_dict(records[-1])
        except ValueError as error:
            raise UserError(f"study {view.name}: {error}") from None
        return Shown(f"study {view.name}", newest)
    if view.machine is None:
        raise UserError(f"study {view.name} keeps neither a calibration nor a machine")
    machine = Machine.from_dict(view.machine)
    return Shown(f"study {view.name} (nothing measured yet)", default_calibration(machine))


def _told(share: float) -> str:
    if share >= TOLD:
        return "yes"
    return "partly" if share >= _SLIGHTLY else "no: still the prior"
