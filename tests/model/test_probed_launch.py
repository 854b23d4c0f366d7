"""A probe times torch calls, the model counts ops: the constants must mean the same unit."""

import pytest
from test_machine import MACHINES

from model.calibration import default_calibration
from model.constants import CPU_CALLS_PER_OP
from model.machine import Machine, Spread, load_machine


def probed(name: str, median_us: float) -> Machine:
    """A shipped machine with another eager launch time."""
    machine = next(load_machine(path) for path in MACHINES if path.stem == name)
    spread = Spread(median_us=median_us, p05_us=median_us, p95_us=median_us, n=9)
    measured = machine.measured.model_copy(update={"launch_eager": spread, "launch_graph": None})
    return machine.model_copy(update={"measured": measured})


@pytest.mark.parametrize(
    ("name", "per_op"),
    [
        pytest.param("cpu-2core", CPU_CALLS_PER_OP, id="cpu-op-makes-several-calls"),
        pytest.param("8x-rtx-pro-6000-direct", 1.0, id="gpu-op-is-one-kernel"),
    ],
)
def test_a_probed_launch_enters_the_calibration_per_op_of_the_model(
    name: str, per_op: float
) -> None:
    constant = default_calibration(probed(name, 3.0)).constant("launch_us")
    assert constant.value == pytest.approx(3.0 * per_op)
    assert constant.source == "probed on this machine"


def test_the_unprobed_cpu_prior_is_what_a_probe_of_a_common_host_gives() -> None:
    machine = next(load_machine(path) for path in MACHINES if path.stem == "cpu-2core")
    bare = machine.model_copy(
        update={"measured": machine.measured.model_copy(update={"launch_eager": None})}
    )
    prior = default_calibration(bare).constant("launch_us").value
    # 2.7 us per call was probed on 2 cores of a shared host
    assert prior == pytest.approx(2.7 * CPU_CALLS_PER_OP, rel=0.2)
