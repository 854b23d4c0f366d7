"""Readers of foreign runs: recorded vLLM files, SGLang samples, cut-off and unknown files."""

import json
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.foreign.detect import read_foreign
from autotune.foreign.literals import keyword_values
from autotune.foreign.run import ForeignRun

DATA = Path(__file__).parents[1] / "data" / "foreign"


def read(name: str) -> ForeignRun:
    return read_foreign(DATA / name)


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("vllm-0.26-eagle3-k3.log", "vLLM server log"),
        ("vllm-0.32-engine-death.log", "vLLM server log"),
        ("vllm-metrics-eagle3-k3.txt", "vLLM /metrics"),
        ("sglang-baseline.log", "SGLang server log"),
        ("sglang-bench.jsonl", "SGLang bench_serving JSONL"),
        ("vllm-bench.json", "vLLM bench serve JSON"),
    ],
)
def test_a_format_is_told_by_content_alone(name: str, format_: str, tmp_path: Path) -> None:
    renamed = tmp_path / "something"
    renamed.write_bytes((DATA / name).read_bytes())
    assert read_foreign(renamed).format == format_


def test_a_recorded_vllm_log_gives_settings_graphs_and_acceptance() -> None:
    run = read("vllm-0.26-eagle3-k3.log")
    assert run.version == "0.26.0"
    assert run.knobs["speculation.method"] == "eagle3"
    assert run.knobs["speculation.steps"] == 3
    assert run.knobs["parallel.tp"] == 1
    # the log says FULL=33 captured graphs
    assert run.knobs["cuda_graph.verify"] is True
    assert run.effective["attention backend"] == "FLASH_ATTN"
    # /metrics of the same server counted 1586, 1202 and 771 of 2025
    assert run.num_verifies == pytest.approx(2025, abs=1)
    assert run.accepted_by_depth == pytest.approx((1586, 1202, 771), abs=1)
    assert run.accept_length == pytest.approx(2.7575, abs=0.001)
    assert run.definition == "server interval with gaps"
    assert run.failure is None


def test_metrics_of_the_same_server_agree_with_its_log() -> None:
    run = read("vllm-metrics-eagle3-k3.txt")
    assert run.accepted_by_depth == (1586.0, 1202.0, 771.0)
    assert run.accept_length == pytest.approx(1 + 3559 / 2025)
    (sample,) = run.samples
    # 18.681 s of decoding over 5565 - 42 tokens, and over 2025 chunks
    assert sample.tpot_ms == pytest.approx(3.3824, abs=1e-3)
    assert sample.step_ms == pytest.approx(9.2253, abs=1e-3)
    assert run.workload == {"input_len": 896, "output_len": 132}
    assert "speculation.method" not in run.knobs


def test_metrics_without_speculation_counters_mean_plain_decoding() -> None:
    assert read("vllm-metrics-baseline.txt").knobs == {"speculation.method": "off"}


@pytest.mark.parametrize(
    ("name", "captured", "tp"),
    [("vllm-0.26-eager.log", False, 1), ("vllm-0.26-tp2-graphs.log", True, 2)],
)
def test_graphs_and_ranks_of_vllm_are_read(name: str, captured: bool, tp: int) -> None:
    run = read(name)
    assert run.knobs["cuda_graph.decode"] is captured
    assert run.knobs["parallel.tp"] == tp
    assert run.knobs["speculation.method"] == "off"


def test_an_unknown_speculation_method_is_left_open() -> None:
    assert "speculation.method" not in read("vllm-0.26-ngram.log").knobs


def test_advice_in_a_log_is_no_environment() -> None:
    # "To disable, set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0." was not set by anybody
    environment = read("vllm-0.26-eagle3-k3.log").environment
    assert environment == {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def test_a_dead_engine_is_told_but_what_breaks_while_stopping_is_not() -> None:
    failure = read("vllm-0.32-engine-death.log").failure
    assert failure is not None
    assert "Synthetic acceptance not supported" in failure
    assert read("vllm-0.26-baseline.log").failure is None


def test_a_sglang_log_gives_tree_graph_and_step_time() -> None:
    run = read("sglang-eagle3-graph.log")
    assert run.knobs == {
        "parallel.tp": 8,
        "speculation.method": "eagle3",
        "speculation.steps": 2,
        "speculation.topk": 1,
        "speculation.draft_tokens": 3,
        "cuda_graph.decode": True,
        "cuda_graph.verify": True,
        "cuda_graph.draft": True,
        "cuda_graph.extend": True,
    }
    # the first decode line spans the prefill and is left out
    assert len(run.samples) == 29
    assert min(s.tokens_per_s for s in run.samples if s.tokens_per_s) > 60
    steps = sorted(s.step_ms for s in run.samples if s.step_ms)
    assert steps[len(steps) // 2] == pytest.approx(24.0, rel=0.02)
    assert run.effective["custom all-reduce"].startswith("disabled: it's not supported")
    assert run.workload["input_len"] == 2011


def test_what_ran_counts_more_than_what_was_allowed(tmp_path: Path) -> None:
    text = (DATA / "sglang-eagle3-graph.log").read_text()
    path = tmp_path / "log"
    path.write_text(text.replace("cuda graph: True", "cuda graph: False"))
    assert read_foreign(path).knobs["cuda_graph.verify"] is False


@pytest.mark.parametrize(
    "line",
    [
        # forms of three releases, as users paste them
        "[2025-10-22 10:27:57 TP0] Decode batch. #running-req: 1, #token: 186, token usage: 0.00, "
        "accept len: 1.95, accept rate: 0.49, cuda graph: True, gen throughput (token/s): 178.86, "
        "#queue-req: 0, ",
        "[2026-08-14 14:02:47 TP0] Decode batch, #running-req: 1, #token: 266, token usage: 0.43, "
        "accept len: 1.95, accept rate: 0.13, pre-allocated usage: 0.22, #prealloc-req: 0, "
        "cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0",
        "[2026-04-05 20:02:51] Decode batch, #running-req: 1, #full token: 11, "
        "full token usage: 0.08, accept len: 1.95, cuda graph: True, "
        "gen throughput (token/s): 178.86, #queue-req: 0",
    ],
    ids=["0.5.3", "0.5.23 prefill split", "hybrid"],
)
def test_decode_lines_of_several_releases_are_read(line: str, tmp_path: Path) -> None:
    path = tmp_path / "pasted"
    path.write_text("\n".join([line] * 3))
    first, *_ = read_foreign(path).samples
    assert first.running == 1
    assert first.tokens_per_s == 178.86
    assert first.accept_length == 1.95
    assert first.cuda_graph is True
    assert first.step_ms == pytest.approx(1e3 * 1.95 / 178.86)


@pytest.mark.parametrize("name", sorted(p.name for p in DATA.glob("*.log")))
def test_a_log_cut_off_anywhere_is_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    text = (DATA / name).read_text()
    path = tmp_path / "half"
    for share in (0.02, 0.1, 0.33, 0.5, 0.77, 0.95):
        path.write_text(text[: int(share * len(text))])
        problem = ""
        try:
            run = read_foreign(path)
        except UserError as error:
            problem = str(error)
        else:
            assert run.format.endswith("server log")
        assert len(problem.splitlines()) <= 1


def test_bench_results_give_decode_speed_not_wall_clock() -> None:
    run = read("sglang-bench.jsonl")
    assert len(run.samples) == 3
    for sample in run.samples:
        assert sample.running == 8
        assert sample.tokens_per_s == pytest.approx(8e3 / sample.tpot_ms)
    assert any("cumulative" in note for note in run.notes)
    assert run.workload["concurrency"] == 8


def test_details_of_a_bench_make_every_request_a_sample() -> None:
    run = read("vllm-bench.json")
    assert len(run.samples) == 12
    # 52 chunks of 19.6 ms carry 131 tokens
    assert run.samples[0].tpot_ms == pytest.approx(52 * 19.6 / 131, rel=0.02)
    assert run.knobs["speculation.steps"] == 3
    assert run.accepted_by_depth == pytest.approx((449.28, 339.84, 218.88))


def test_lines_of_different_experiments_are_not_one_run(tmp_path: Path) -> None:
    lines = (DATA / "sglang-bench.jsonl").read_text().splitlines()
    other = {**json.loads(lines[0]), "max_concurrency": 32, "concurrency": 31.2}
    path = tmp_path / "two.jsonl"
    path.write_text(lines[0] + "\n" + json.dumps(other) + "\n")
    with pytest.raises(UserError, match=r"max_concurrency is 8 in line 1 and 32 in line 2"):
        read_foreign(path)
    assert read_foreign(path, 2).samples[0].running == 32
    with pytest.raises(UserError, match="holds 2 results"):
        read_foreign(path, 3)


def test_a_cut_off_last_line_of_jsonl_is_left_out(tmp_path: Path) -> None:
    text = (DATA / "sglang-bench.jsonl").read_text()
    path = tmp_path / "half.jsonl"
    path.write_text(text[:-200])
    assert len(read_foreign(path).samples) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("hello world\n", "of no known format"),
        ('{"a": 1}', "JSON of no known kind"),
        ('{"output_throughput": 1, ', "half-written"),
        ("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n", "without a"),
    ],
    ids=["empty", "prose", "other JSON", "half JSON", "idle metrics"],
)
def test_files_without_a_run_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        read_foreign(path)
    assert len(str(caught.value).splitlines()) == 1
    assert str(path) in str(caught.value)


def test_values_in_logs_survive_brackets_quotes_and_cuts() -> None:
    text = "a=1, b='x, y(z', c=Thing(d=2, e=[1, 2]), f=torch.bfloat16, g=None, h={'k': Tru"
    assert keyword_values(text) == {
        "a": 1,
        "b": "x, y(z",
        "c": "Thing(d=2, e=[1, 2])",
        "f": "torch.bfloat16",
        "g": None,
    }


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("#running-req: 3, #token: 9, accept len: 2.10, cuda graph: True, "
         "gen throughput (token/s): 101.5, #queue-req: 0", (3, 2.1, True, 101.5)),
        ("#running-req: 1, cuda graph: False", (1, None, False, None)),
        ("#running-req: 2, accept len: nope, gen throughput (token/s): 7", (2, None, None, 7.0)),
        ("#runn", None),
    ],
    ids=["whole", "no speculation", "odd number", "cut off"],
)  # fmt: skip
def test_a_decode_line_is_read_by_one_reader(
    tail: str, expected: tuple[object, ...] | None
) -> None:
    from dataclasses import astuple

    from autotune.foreign.sglang_decode import read_decode_line

    found = read_decode_line(f"[2026-01-02 03:04:05 TP0] Decode batch, {tail}")
    assert (None if found is None else astuple(found)) == expected
    assert read_decode_line(f"[2026-01-02 03:04:05 TP0] Prefill batch, {tail}") is None
