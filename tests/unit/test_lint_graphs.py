"""Which forwards lint takes to run in CUDA graphs, and that its forecast follows them."""

import pytest

from autotune.lint.graphs import graphs_of
from autotune.lint.rules_model import forecast
from autotune.lint.run import Request, make_setup
from autotune.lint.setup import Setup

HOST = "studies/machines/8x-rtx-pro-6000-switches.yaml"
SGLANG = (
    "--tp 8 --speculative-algorithm EAGLE3 --speculative-num-steps 2 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 3 --speculative-draft-model-path /m/d"
)
VLLM = (
    "vllm serve /m/t -tp 8 --speculative-config "
    '\'{"method":"eagle3","num_speculative_tokens":2,"model":"/m/d"}\''
)
ENGINE = "parallel.tp=8 speculation.steps=2 speculation.topk=1"
JSON_OFF = ' --cuda-graph-config \'{"decode":{"backend":"disabled"}}\''
CPU = "--tp 2 --device cpu"


def setup_of(engine: str, args: str, **more: object) -> Setup:
    """A setup on eight PCIe GPUs."""
    values = {"machine": HOST, "target": "kimi-k2.5", "concurrency": 1, **more}
    return make_setup(Request(engine=engine, args=args, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "args", "more", "verify", "reason"),
    [
        pytest.param("sglang", SGLANG, {}, "full", "", id="sglang-default"),
        pytest.param("sglang", SGLANG + " --disable-cuda-graph", {}, "eager",
                     "--disable-cuda-graph", id="sglang-off"),
        pytest.param("sglang", SGLANG + " --cuda-graph-backend-decode disabled",
                     {"version": "0.5.23"}, "eager", "backend-decode", id="sglang-new-off"),
        pytest.param("sglang", SGLANG + JSON_OFF, {"version": "0.5.23"}, "eager",
                     "cuda-graph-config", id="sglang-json-off"),
        pytest.param("sglang", SGLANG + " --cuda-graph-max-bs 4 --max-running-requests 16",
                     {"concurrency": 8}, "eager", "8 requests, captured up to 4",
                     id="sglang-above"),
        pytest.param("sglang", SGLANG + " --cuda-graph-max-bs 8", {"concurrency": 8}, "full",
                     "", id="sglang-within"),
        pytest.param("sglang", SGLANG + " --cuda-graph-bs 1 2 16", {"concurrency": 12}, "full", "",
                     id="sglang-listed-sizes"),
        pytest.param("sglang", SGLANG + " --attention-backend torch_native", {}, "eager",
                     "torch_native", id="sglang-backend"),
        pytest.param("vllm", VLLM, {}, "full", "", id="vllm-default"),
        pytest.param("vllm", VLLM + " --enforce-eager", {}, "eager", "--enforce-eager",
                     id="vllm-eager"),
        pytest.param("vllm", VLLM + ' --compilation-config \'{"cudagraph_mode":"NONE"}\'', {},
                     "eager", "cudagraph_mode NONE", id="vllm-none"),
        pytest.param("vllm", VLLM + ' --compilation-config \'{"cudagraph_mode":"PIECEWISE"}\'', {},
                     "partial", "PIECEWISE", id="vllm-piecewise"),
        pytest.param("vllm", VLLM + ' -O.cudagraph_mode=FULL_DECODE_ONLY', {}, "full", "",
                     id="vllm-full-decode"),
        pytest.param("vllm", VLLM + " --max-cudagraph-capture-size 8", {"concurrency": 4}, "eager",
                     "12 tokens a forward, captured up to 8", id="vllm-tokens-not-requests"),
        pytest.param("vllm", VLLM + " --attention-backend TRITON_MLA", {"version": "0.16.0"},
                     "partial", "TRITON_MLA", id="vllm-backend-declines"),
        pytest.param("vllm", VLLM + " --attention-backend TRITON_MLA", {"version": "0.33.0"},
                     "full", "", id="vllm-backend-fixed"),
        pytest.param("engine", ENGINE, {}, "eager", "off by default", id="engine-default"),
        pytest.param("engine", ENGINE + " cuda_graph.draft=true cuda_graph.verify=true "
                     "cuda_graph.extend=true", {}, "full", "", id="engine-on"),
        pytest.param("engine", ENGINE + " cuda_graph.draft=true cuda_graph.verify=false "
                     "cuda_graph.extend=true", {}, "eager", "cuda_graph.verify false",
                     id="engine-verify-off"),
    ],
)  # fmt: skip
def test_the_verify_is_captured_as_the_server_would(
    engine: str, args: str, more: dict[str, object], verify: str, reason: str
) -> None:
    found = graphs_of(setup_of(engine, args, **more))
    assert found.verify == verify
    text = found.text(speculative=True)
    assert reason in text
    assert bool(text) == (verify != "full")


def test_only_the_extend_is_eager_where_its_switch_is_set() -> None:
    switch = "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH=1"
    found = graphs_of(setup_of("sglang", SGLANG, env=switch))
    assert (found.draft, found.verify, found.extend) == ("full", "full", "eager")


def test_a_plain_step_may_be_captured_where_its_verify_is_too_wide() -> None:
    found = graphs_of(setup_of("vllm", VLLM + " --max-cudagraph-capture-size 8", concurrency=4))
    assert (found.decode, found.verify) == ("full", "eager")


@pytest.mark.parametrize(
    ("engine", "on", "off"),
    [
        pytest.param("sglang", SGLANG, SGLANG + " --disable-cuda-graph", id="sglang"),
        pytest.param("vllm", VLLM, VLLM + " --enforce-eager", id="vllm"),
    ],
)
def test_the_forecast_of_a_server_without_graphs_is_slower(engine: str, on: str, off: str) -> None:
    captured, eager = forecast(setup_of(engine, on)), forecast(setup_of(engine, off))
    assert captured is not None
    assert eager is not None
    assert captured.graphs == ""
    assert "without CUDA graphs" in eager.graphs
    # 61 layers launched kernel by kernel are bound by the host
    assert eager.cycle_ms[0] > 1.2 * captured.cycle_ms[0]
    assert eager.plain_ms[0] > 1.2 * captured.plain_ms[0]


def test_a_partly_captured_verify_lies_between_captured_and_eager() -> None:
    mode = ' --compilation-config \'{"cudagraph_mode":"PIECEWISE"}\''
    captured, partly, eager = (
        forecast(setup_of("vllm", VLLM + more)) for more in ("", mode, " --enforce-eager")
    )
    assert captured is not None
    assert partly is not None
    assert eager is not None
    assert captured.cycle_ms[0] < partly.cycle_ms[0] < eager.cycle_ms[0]
    assert partly.cycle_ms[1] == captured.cycle_ms[1]
    assert partly.cycle_ms[2] == eager.cycle_ms[2]


def test_nothing_is_captured_on_cpu_ranks() -> None:
    assert graphs_of(setup_of("sglang", CPU)).decode == "eager"
