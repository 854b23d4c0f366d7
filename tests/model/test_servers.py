"""What a server changes in a prediction: kernels, launches, whether its host takes part."""

from dataclasses import replace
from pathlib import Path

import pytest

from model import compute
from model.acceptance import AcceptanceModel
from model.calibration import Calibration, default_calibration
from model.machine import load_machine
from model.predictor import Predictor
from model.servers import ENGINE, GENERIC, SERVERS, server_of
from model.shapes import DraftShape, ModelShape
from model.spec import Knobs, Workload
from model.step_program import phases_of

STUDIES = Path(__file__).parents[2] / "studies"
H200 = load_machine(STUDIES / "machines/1x-h200.yaml")
CPU = load_machine(STUDIES / "machines/cpu-2core.yaml")
LOAD = Workload(
    prompts="x", prompts_sha256="", chat_template=None, input_len=64, output_len=24, context=76,
    temperature=0.0, ignore_eos=True, seed=0, concurrency=1,
)  # fmt: skip
GRAPHS = {f"cuda_graph.{name}": True for name in ("decode", "draft", "verify", "extend")}
CHAIN = {
    **GRAPHS,
    "parallel.tp": 1,
    "speculation.method": "eagle3",
    "speculation.steps": 3,
    "speculation.topk": 1,
    "speculation.draft_tokens": 4,
}


def tiny(server: str, machine: str = "1x-h200") -> Predictor:
    host = load_machine(STUDIES / f"machines/{machine}.yaml")
    target = ModelShape.load(STUDIES / "models/tiny-moe")
    draft = DraftShape.load(STUDIES / "models/tiny-moe-eagle3", target=target)
    calibration = default_calibration(host, server)
    return Predictor(target, draft, host, calibration, AcceptanceModel.prior())


def test_an_unknown_server_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="server 'sglanf' is unknown; known: generic, sglang"):
        default_calibration(H200, "sglanf")


@pytest.mark.parametrize("name", list(SERVERS))
def test_every_server_has_a_calibration_that_survives_json(name: str) -> None:
    made = default_calibration(H200, name)
    again = Calibration.from_dict(made.to_dict())
    assert again.server == name
    assert again.id == made.id


def test_servers_have_calibrations_of_their_own_id() -> None:
    assert default_calibration(H200, "sglang").id != default_calibration(H200).id


@pytest.mark.parametrize("name", ["engine", "vllm", "sim"])
def test_on_a_cpu_no_server_fuses_or_captures(name: str) -> None:
    assert server_of(name, CPU).kernels == GENERIC.kernels
    values = default_calibration(CPU, name)
    assert [c.value for c in values.constants] == [
        c.value for c in default_calibration(CPU).constants
    ]


def test_a_fused_engine_runs_half_the_kernels_of_a_layer() -> None:
    shape = tiny("engine").target
    fused = sum(compute.kernel_counts(shape, ENGINE.kernels).values())
    generic = sum(compute.kernel_counts(shape, GENERIC.kernels).values())
    assert fused / shape.layers == pytest.approx(7, abs=0.5)
    assert fused < 0.55 * generic


def test_a_cycle_captured_whole_leaves_the_host_out() -> None:
    captured = tiny("engine").predict(Knobs.of(CHAIN), LOAD).terms_ms
    eager = tiny("engine").predict(Knobs.of({**CHAIN, "cuda_graph.verify": False}), LOAD).terms_ms
    assert captured["host_gap"].median + captured["sample"].median < 0.03
    # the host waits for the verify it launched, then launches what samples from it
    assert eager["host_gap"].median > 0.1
    assert eager["sample"].median > 0.1


@pytest.mark.parametrize("server", ["engine", "generic"])
def test_the_simulated_cycle_has_the_predicted_kernels(server: str) -> None:
    p = tiny(server)
    phases = phases_of(p.step, p.calibration, Knobs.of(CHAIN), LOAD)
    verify = next(phase for phase in phases if phase.name == "verify")
    counted = sum(compute.kernel_counts(p.target, p.step.server.kernels).values())
    assert len(verify.ops) == counted


def test_a_whole_draft_is_no_faster_on_two_ranks() -> None:
    times = {}
    for tp, machine in ((1, "1x-h200"), (2, "2x-h200-nvlink")):
        p = tiny("engine", machine)
        # the same device on both, and nothing to hand over
        same = tiny("engine").calibration
        held = {c.name: c.value for c in same.constants if c.name in p.calibration.names}
        held |= {"draft_reduce_factor": 1e-6, "gather_factor": 1e-6}
        p = replace(p, calibration=p.calibration.with_values(**held))
        knobs = Knobs.of({**CHAIN, "parallel.tp": tp, "collectives.backend": "nccl"})
        times[tp] = p.predict(knobs, LOAD).terms_ms["draft"].median
    assert times[2] == pytest.approx(times[1], rel=0.02)


def test_trees_cost_the_engine_per_draft_step() -> None:
    p = tiny("engine")

    def draft(steps: int, topk: int) -> float:
        tree = {"speculation.steps": steps, "speculation.topk": topk,
                "speculation.draft_tokens": steps + 1 if topk == 1 else 4}  # fmt: skip
        return p.predict(Knobs.of({**CHAIN, **tree}), LOAD).terms_ms["draft"].median

    extra = [draft(steps, 4) - draft(steps, 1) for steps in (1, 5)]
    assert extra[1] - extra[0] == pytest.approx(4 * p.calibration["tree_step_us"] / 1e3, rel=0.05)
