"""Foreign runs as people have them: collected, compressed, cut; verdicts on small differences."""

import bz2
import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.diff.compare import Comparison, compare
from autotune.diff.render import to_json
from autotune.diff.resolve import Resolver, same_file
from autotune.diff.run import Run, Series
from autotune.errors import UserError
from autotune.foreign.detect import read_foreign
from autotune.foreign.run import with_article

DATA = Path(__file__).parents[1] / "data" / "foreign"
GRAPH = DATA / "sglang-eagle3-graph.log"
BASELINE = DATA / "sglang-baseline.log"
SPEED = re.compile(r"gen throughput \(token/s\): ([\d.]+)")


def diff(a: Path, b: Path, tmp_path: Path) -> Comparison:
    resolver = Resolver(f"sqlite:///{tmp_path}/none.db")
    return compare(resolver.run(str(a)), resolver.run(str(b)))


def scaled(source: Path, factor: Callable[[int], float], target: Path) -> Path:
    """The log of a server whose n-th interval is ``factor(n)`` times as fast."""
    count = iter(range(10_000))

    def times(match: re.Match[str]) -> str:
        speed = float(match[1]) * factor(next(count))
        return f"gen throughput (token/s): {speed:.2f}"

    target.write_text(SPEED.sub(times, source.read_text()))
    return target


@pytest.mark.parametrize(
    ("name", "text"),
    [("SGLang server log", "an SGLang server log"), ("vLLM /metrics", "a vLLM /metrics"),
     ("trial", "a trial"), ("best-config YAML", "a best-config YAML")],
)  # fmt: skip
def test_articles_go_by_the_sound(name: str, text: str) -> None:
    assert with_article(name) == text


def test_no_text_says_a_sglang(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    with pytest.raises(UserError, match="give an SGLang or vLLM server log"):
        read_foreign(tmp_path / "empty.log")
    shown = json.dumps(to_json(diff(GRAPH, BASELINE, tmp_path)))
    assert "an SGLang server log does not tell" in shown
    assert "a SGLang" not in shown


def compose(line: str) -> str:
    return f"\x1b[36msglang-1  | \x1b[0m{line}"


def json_file(line: str) -> str:
    return json.dumps({"log": line, "stream": "stderr", "time": "2026-03-05T09:12:04Z"}) + "\n"


@pytest.mark.parametrize("wrap", [compose, json_file, lambda line: line.replace("\n", "\r\n")],
                         ids=["compose", "docker-json-file", "crlf"])  # fmt: skip
@pytest.mark.parametrize("name", ["sglang-eagle3-graph.log", "vllm-0.26-eagle3-k3.log"])
def test_a_log_is_the_same_in_what_collected_it(
    wrap: Callable[[str], str], name: str, tmp_path: Path
) -> None:
    plain = read_foreign(DATA / name)
    path = tmp_path / name
    lines = (DATA / name).read_text().splitlines(keepends=True)
    path.write_text("".join(map(wrap, lines)), newline="")
    found = read_foreign(path)
    assert (found.format, found.samples, found.knobs) == (plain.format, plain.samples, plain.knobs)
    assert found.args == plain.args
    assert found.effective == plain.effective


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress], ids=["gz", "bz2"])
@pytest.mark.parametrize("name", ["sglang-baseline.log", "sglang-bench.jsonl", "vllm-bench.json"])
def test_compressed_runs_are_read_as_they_are(
    pack: Callable[[bytes], bytes], name: str, tmp_path: Path
) -> None:
    packed = tmp_path / f"{name}.packed"
    packed.write_bytes(pack((DATA / name).read_bytes()))
    assert read_foreign(packed).samples == read_foreign(DATA / name).samples


def test_the_same_settings_beyond_noise_are_not_explained_by_anything_recorded(
    tmp_path: Path,
) -> None:
    slow = scaled(BASELINE, lambda _: 0.8, tmp_path / "slow.log")
    found = diff(BASELINE, slow, tmp_path)
    assert found.verdict.kind == "not explained by anything recorded"
    assert "nothing that is known on both sides differs" in found.verdict.text
    assert any("NCCL_DEBUG_FILE" in line for line in found.verdict.record_next)


@pytest.mark.parametrize(("factor", "kind"), [(0.987, "within noise"), (1.013, "within noise")])
def test_a_start_is_no_finer_measure_than_two_starts_of_one_configuration(
    factor: float, kind: str, tmp_path: Path
) -> None:
    """29 intervals of one start agree within 0.8 %; another start of the same may be 2 % off."""
    other = scaled(BASELINE, lambda _: factor, tmp_path / "other.log")
    found = diff(BASELINE, other, tmp_path)
    assert found.measured is not None
    assert not found.measured.faster.low <= 1 <= found.measured.faster.high
    assert found.verdict.kind == kind
    assert "two starts of one configuration" in found.verdict.text


def test_a_step_that_changed_is_told_although_acceptance_hides_it(tmp_path: Path) -> None:
    other = scaled(GRAPH, lambda _: 0.96, tmp_path / "other.log")
    found = diff(GRAPH, other, tmp_path)
    assert found.verdict.kind == "within noise"
    assert "The step alone is longer (-4.0 % in speed" in found.verdict.text
    same = diff(GRAPH, GRAPH, tmp_path)
    assert "step alone" not in same.verdict.text


def test_two_speeds_of_one_run_are_told(tmp_path: Path) -> None:
    other = scaled(BASELINE, lambda n: 0.6 if n % 10 < 5 else 1.0, tmp_path / "other.log")
    text = diff(BASELINE, other, tmp_path).verdict.text
    assert "two groups" in text


def test_intervals_without_work_are_no_speed(tmp_path: Path) -> None:
    idle = scaled(BASELINE, lambda n: 0.0 if n % 7 == 3 else 1.0, tmp_path / "idle.log")
    found = diff(BASELINE, idle, tmp_path)
    assert found.verdict.kind == "within noise"
    assert found.measured is not None
    assert found.measured.b.n < found.measured.a.n


def test_one_file_by_two_names_is_noticed(tmp_path: Path) -> None:
    link = tmp_path / "link.log"
    link.symlink_to(GRAPH)
    assert same_file(str(link), str(GRAPH))
    assert not same_file(str(GRAPH), str(BASELINE))
    assert not same_file("study:1", "study:1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("[1, 2, 3]", "of no known format", id="numbers"),
        pytest.param("{}", "JSON of no known kind", id="empty-object"),
        pytest.param('{"log": 3}', "JSON of no known kind", id="no-log"),
        pytest.param('{"output_throughput": ', "half-written", id="cut"),
        pytest.param("\x00\x01\x02" * 500, "of no known format", id="binary"),
        pytest.param("   \n\n", "is empty", id="blank"),
        pytest.param("h:7:7 [0] NCCL INFO Init", "autotune env check", id="nccl-log"),
        pytest.param('{"log":"hello\\n"}\n{"log":"you\\n"}\n', "of no known", id="other-log"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_foreign(path)
    message = str(caught.value)
    assert says in message
    assert str(path) in message
    assert "\n" not in message


V0 = """INFO 02-15 22:09:40 api_server.py:585] vLLM API server version 0.6.3
INFO 02-15 22:09:41 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: \
model='m/70b', speculative_config=SpeculativeConfig(draft_model='m/1b', num_spec_tokens=5), \
tensor_parallel_size=8, enforce_eager=False
INFO 02-15 22:10:03 metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg generation \
throughput: 37.8 tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: \
0.1%, CPU KV cache usage: 0.0%.
INFO 02-15 22:10:03 metrics.py:482] Speculative metrics: Draft acceptance rate: 0.797, System \
efficiency: 0.640, Number of speculative tokens: 5, Number of accepted tokens: 1977, Number of \
draft tokens: 2480, Number of emitted tokens: 1904.
"""


def test_logs_of_the_v0_engine_of_vllm_are_read(tmp_path: Path) -> None:
    path = tmp_path / "v0.log"
    path.write_text(V0)
    run = read_foreign(path)
    (sample,) = run.samples
    assert (run.version, sample.running, sample.tokens_per_s) == ("0.6.3", 1, 37.8)
    # 2480 drafts, 5 a step: 496 verifies emitted 1904 tokens
    assert sample.accept_length == pytest.approx(1904 / 496)
    assert run.args["tensor_parallel_size"] == 8


@pytest.mark.parametrize(
    ("floor", "says"),
    [(0.32, "the A/A difference of the study (32.0 %)"), (None, "commonly do (2 %)"),
     (0.005, "commonly do (2 %)")],
)  # fmt: skip
def test_single_numbers_are_judged_by_the_floor_that_is_known(
    floor: float | None, says: str
) -> None:
    series = [
        Series(concurrency=1, definition="decode", tokens_per_s=values)
        for values in ((100.0,), (101.5,))
    ]
    floors = {} if floor is None else {1: floor}
    runs = [
        Run(
            label=name, kind="trial", facts={}, unknown={}, series=(one,), knobs={}, workload={},
            noise_floors=floors,
        )
        for name, one in zip("ab", series, strict=True)
    ]  # fmt: skip
    verdict = compare(runs[0], runs[1]).verdict
    assert (verdict.kind, says in verdict.text) == ("within noise", True)


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.iterdir() if "vllm" in path.name
                                        or "sglang" in path.name))  # fmt: skip
@pytest.mark.parametrize("seed", range(12))
def test_damaged_files_are_read_or_refused_never_a_crash(
    name: str, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    data = bytearray((DATA / name).read_bytes())
    if seed % 3 == 0:
        data = data[chance.randrange(len(data)) :]
    elif seed % 3 == 1:
        data = data[: chance.randrange(1, len(data))]
    for _ in range(len(data) // 40):
        # digits and dots moved about break numbers and dates
        data[chance.randrange(len(data))] = chance.choice(b'0123456789.:-+e \n{}"')
    path = tmp_path / name
    path.write_bytes(bytes(data))
    resolver = Resolver(f"sqlite:///{tmp_path}/none.db")
    try:
        run = resolver.run(str(path))
    except UserError:
        # one line, as another test holds
        return
    to_json(compare(run, resolver.run(str(DATA / "sglang-baseline.log"))))
