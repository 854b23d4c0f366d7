"""What `autotune probe` measured on a machine, as observations and in a calibration."""

from model.calibrate import calibrate
from model.calibration import Calibration
from model.collectives import CollectiveTimes
from model.machine import Machine
from model.observations import AllreduceObservation

#: spread of a probe row, relative
_PROBE_SD = 0.05


def probed_rows(machine: Machine) -> list[AllreduceObservation]:
    """The all-reduces that ``autotune probe`` measured on this machine."""
    return [
        AllreduceObservation(
            backend=row.backend,
            num_ranks=row.num_ranks,
            size_bytes=row.size_bytes,
            graphed=row.mode == "graph",
            time_us=row.time_us,
            rel_sd=_PROBE_SD,
            environment=row.env,
            source=f"probe of {machine.name}",
        )
        for row in machine.measured.allreduce
    ]


def with_probe(calibration: Calibration, machine: Machine) -> Calibration:
    """The calibration updated by the all-reduces that the machine's probe measured."""
    return calibrate(calibration, probed_rows(machine), None, CollectiveTimes(machine))
