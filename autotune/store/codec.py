"""Model values to and from plain JSON: knobs, workloads, predictions."""

from dataclasses import asdict
from typing import Any

from model.spec import Inert, Interval, Knobs, Prediction, Workload

Json = dict[str, Any]


def knobs_to_json(knobs: Knobs) -> Json:
    """Values by dotted name."""
    return dict(knobs.values())


def knobs_from_json(values: Json) -> Knobs:
    """Inverse of ``knobs_to_json``."""
    return Knobs.of(values)


def workload_from_json(values: Json) -> Workload:
    """Inverse of ``dataclasses.asdict``."""
    return Workload(**values)


def prediction_to_json(prediction: Prediction) -> Json:
    """Everything but the knobs, which the trial holds."""
    values = asdict(prediction)
    del values["knobs"]
    values["inert"] = [asdict(item) for item in prediction.inert]
    return values


def prediction_from_json(knobs: Knobs, values: Json) -> Prediction:
    """Inverse of ``prediction_to_json`` for the trial's ``knobs``."""
    return Prediction(
        knobs=knobs,
        workload=workload_from_json(values["workload"]),
        calibration_id=values["calibration_id"],
        terms_ms={name: Interval(**term) for name, term in values["terms_ms"].items()},
        cycle_ms=Interval(**values["cycle_ms"]),
        accept_length=Interval(**values["accept_length"]),
        tokens_per_s=Interval(**values["tokens_per_s"]),
        speed_of_light_ms=values["speed_of_light_ms"],
        memory_gib_per_gpu=values["memory_gib_per_gpu"],
        feasible=values["feasible"],
        infeasible_reason=values["infeasible_reason"],
        inert=tuple(Inert(**item) for item in values["inert"]),
    )
