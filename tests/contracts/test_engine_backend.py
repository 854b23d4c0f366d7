"""The engine backend beyond the contract: output checks, failures, refusals, the exported file."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from contract_harness import context_of, knobs, study_of, workload_of

from autotune.backends.base import Backend
from autotune.backends.engine_args import study_prompts
from autotune.backends.registry import create_backend
from autotune.errors import UserError
from autotune.export import Evidence, LaunchOptions, LevelBest, Throughput, write_best
from autotune.records import Health
from autotune.schemas import Study
from engine.api import Engine
from engine.config_file import load_config
from engine.errors import EngineError
from engine.results import Request
from model.spec import Knobs, Workload

PLAIN = knobs(1, "gloo")
CHAIN = knobs(1, "gloo", method="eagle3", steps=2, topk=1)
TREE = knobs(1, "gloo", method="eagle3", steps=2, topk=2, draft_tokens=5)

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")


def backend_of(study: Study, folder: Path) -> Backend:
    return create_backend("engine", context_of(study, folder))


@pytest.fixture(scope="module")
def fp32(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """An open engine of one rank that hangs after 4 s of silence."""
    study = study_of("engine", {"device": "cpu", "timeout_s": 200}, checkpoint)
    backend = backend_of(study, tmp_path_factory.mktemp("fp32"))
    backend.open(backend.group(PLAIN))
    yield backend
    backend.close()


def workload(checkpoint: Path, concurrency: int = 2) -> Workload:
    return workload_of(study_of("engine", {}, checkpoint), concurrency)


def test_speculation_before_any_baseline_is_checked_against_plain_decoding(
    fp32: Backend, checkpoint: Path
) -> None:
    measured = fp32.measure(TREE, workload(checkpoint), 0)
    assert measured.output_check == "exact"
    assert measured.notes == ("output: 24 tokens of 2 prompts equal the baseline's",)


def test_a_wrong_output_is_a_failure_that_keeps_its_numbers(
    fp32: Backend, checkpoint: Path
) -> None:
    load = replace(workload(checkpoint), seed=99)
    fp32.measure(PLAIN, load, 0)
    references = fp32._baselines._references  # type: ignore[attr-defined]
    held = references[load]
    wrong = ((*held.tokens[0][:5], (held.tokens[0][5] + 1) % 256, *held.tokens[0][6:]),)
    references[load] = replace(held, tokens=(*wrong, *held.tokens[1:]))
    measured = fp32.measure(CHAIN, load, 0)
    assert measured.output_check == "incorrect"
    assert measured.failure is not None
    assert (measured.failure.kind, measured.failure.stage) == ("incorrect", "check")
    assert "prompt 0 diverges at token 5" in measured.failure.message
    assert measured.tokens_per_s is not None


def test_sampled_output_is_unverified_with_the_reason(fp32: Backend, checkpoint: Path) -> None:
    load = replace(workload(checkpoint), temperature=0.8)
    measured = fp32.measure(CHAIN, load, 0)
    assert measured.failure is None
    assert measured.output_check == "unverified"
    assert "temperature 0.8" in measured.notes[0]


def test_a_device_that_slowed_itself_down_fails_the_repeat(
    fp32: Backend, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = Health(device="gpu0", throttle_reasons=("hw_thermal_slowdown",))
    monkeypatch.setattr("autotune.backends.engine_backend.snapshot", lambda device: (hot,))
    measured = fp32.measure(PLAIN, workload(checkpoint), 5)
    assert measured.failure is not None
    assert measured.failure.kind == "unhealthy_host"
    assert "gpu0: hw_thermal_slowdown" in measured.failure.message
    assert measured.health_after == (hot,)


def test_each_level_serves_its_own_number_of_requests(fp32: Backend, checkpoint: Path) -> None:
    assert len(fp32.measure(CHAIN, workload(checkpoint, 1), 0).prompts) == 1
    assert len(fp32.measure(CHAIN, workload(checkpoint, 2), 0).prompts) == 2


def test_provenance_names_config_worker_and_machine(fp32: Backend) -> None:
    found = fp32.provenance()
    engine = found.config["engine"]
    assert isinstance(engine, dict)
    assert (engine["tp"], engine["device"], engine["dtype"]) == (1, "cpu", "float32")
    assert [rank.rank for rank in found.ranks] == [0]
    assert found.ranks[0].environment["OMP_NUM_THREADS"] == "1"
    assert len(found.machine_fingerprint) == 12


def test_a_worker_that_stops_answering_is_a_hang_and_the_next_repeat_works(
    checkpoint: Path, tmp_path: Path
) -> None:
    study = study_of("engine", {"device": "cpu", "timeout_s": 200}, checkpoint)
    backend = backend_of(study, tmp_path)
    backend.open(backend.group(PLAIN))
    load = workload(checkpoint)
    assert backend.measure(PLAIN, load, 0).failure is None
    supervisor = backend._engine._supervisor  # type: ignore[attr-defined]
    supervisor.config = supervisor.config.model_copy(update={"timeout_s": 2.0})
    os.kill(backend.provenance().ranks[0].pid, signal.SIGSTOP)
    measured = backend.measure(PLAIN, load, 1)
    assert measured.failure is not None
    assert measured.failure.kind == "hang"
    assert backend.measure(PLAIN, load, 2).failure is None
    backend.close()


def test_in_bf16_output_is_judged_by_margins(checkpoint: Path, tmp_path: Path) -> None:
    study = study_of("engine", {"device": "cpu", "dtype": "bfloat16", "timeout_s": 200}, checkpoint)
    backend = backend_of(study, tmp_path)
    backend.open(backend.group(PLAIN))
    load = workload(checkpoint)
    for each in (PLAIN, CHAIN, TREE):
        measured = backend.measure(each, load, 0)
        assert measured.output_check in ("exact", "near_tie"), measured.notes
    baselines = backend._baselines  # type: ignore[attr-defined]
    reference = baselines._references[load]
    assert reference.margins is not None
    assert [len(margins) for margins in reference.margins] == [12, 12]
    # 2 prompts again, as repeats are measured, and alone, 12 tokens each, less what follows a
    # divergence; and 11 places of each prompt, forced
    assert 22 < baselines._noise[load].num_tokens <= 72 + 22
    # a divergence where the baseline was sure is wrong, whatever the dtype
    sure = max(range(12), key=lambda i: reference.margins[0][i])
    wrong = list(reference.tokens[0])
    wrong[sure] = (wrong[sure] + 1) % 256
    checked = baselines.check(CHAIN, load, [wrong, reference.tokens[1]])
    assert checked.verdict == "incorrect"
    backend.close()


def test_plain_decoding_shares_the_start_of_its_speculative_neighbours(
    checkpoint: Path, tmp_path: Path
) -> None:
    space = {
        "speculation.method": ["off", "eagle3"],
        "speculation.steps": [2],
        "cuda_graph.decode": [True],
        "cuda_graph.verify": [True, False],
        "cuda_graph.draft": [True],
    }
    study = study_of("engine", {"device": "cpu"}, checkpoint, space)
    backend = backend_of(study, tmp_path)
    graphs = {"cuda_graph.decode": True, "cuda_graph.verify": True, "cuda_graph.draft": True}
    plain = Knobs.of({**PLAIN.values(), **graphs})
    chain = Knobs.of({**CHAIN.values(), **graphs})
    eager = Knobs.of({**chain.values(), "cuda_graph.verify": False})
    assert backend.group(plain) == backend.group(chain)
    assert backend.group(eager) != backend.group(chain)


def test_a_target_without_weights_gets_random_prompts_of_its_vocabulary(tmp_path: Path) -> None:
    study = study_of("engine", {"device": "cpu"}, None)
    prompts = study_prompts(study, 3)
    assert [len(ids) for ids in prompts.token_ids] == [24, 24, 24]
    assert prompts == study_prompts(study, 3)
    assert len(set(prompts.token_ids)) == 3


@pytest.mark.gpu
def test_nccl_settings_are_proved_by_nccls_own_log(checkpoint: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL carries nothing on one GPU")
    args: dict[str, object] = {"device": "cuda", "nccl_log": "tuning"}
    backend = backend_of(study_of("engine", args, checkpoint), tmp_path)
    asked = Knobs.of(
        {"parallel.tp": 2, "collectives.backend": "nccl", "nccl.algo": "ring", "nccl.proto": "LL"}
    )
    backend.open(backend.group(asked))
    measured = backend.measure(asked, workload(checkpoint), 0)
    found = backend.provenance()
    backend.close()
    assert measured.failure is None
    assert [rank.environment["NCCL_PROTO"] for rank in found.ranks] == ["LL", "LL"]
    choices = found.nccl["allreduce_choices"]
    assert isinstance(choices, list)
    assert {(choice["algo"], choice["proto"]) for choice in choices} == {("RING", "LL")}
    assert found.nccl["transports"]


@pytest.mark.gpu
def test_more_ranks_than_gpus_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    space: dict[str, object] = {"parallel.tp": [there + 1]}
    with pytest.raises(UserError, match=rf"space\.parallel\.tp: .* torch sees {there}"):
        backend_of(study_of("engine", {"device": "cuda"}, checkpoint, space), tmp_path)


@needs_no_gpu
def test_gpus_where_none_is_are_refused_with_the_key_and_the_way_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    study = study_of("engine", {"device": "cuda"}, checkpoint)
    with pytest.raises(UserError, match=r"backend\.args\.device: cuda .* write device: cpu"):
        backend_of(study, tmp_path)


@pytest.mark.parametrize(
    ("args", "workload_values", "match"),
    [
        pytest.param({"devise": "cpu"}, {}, r"backend\.args\.devise: .*known: device, dtype",
                     id="unknown-argument"),
        pytest.param({"threads": "two"}, {}, r"backend\.args\.threads: .*'two'", id="wrong-type"),
        pytest.param({"device": "cpu"}, {"input_len": 600},
                     r"input_len 600 \+ output_len 12 = 612 tokens, but .* allows 512",
                     id="longer-than-the-model-allows"),
        pytest.param({"device": "cpu", "max_context": 20}, {},
                     r"backend\.args\.max_context: 20 is below .* 36", id="context-too-short"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_starts(
    checkpoint: Path,
    tmp_path: Path,
    args: dict[str, object],
    workload_values: dict[str, object],
    match: str,
) -> None:
    with pytest.raises(UserError, match=match):
        backend_of(study_of("engine", args, checkpoint, **workload_values), tmp_path)


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json in .*nowhere"):
        backend_of(study_of("engine", {"device": "cpu"}, tmp_path / "nowhere"), tmp_path)


def test_a_truncated_checkpoint_is_named_at_the_first_start(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in checkpoint.iterdir():
        data = file.read_bytes()
        cut = data[: len(data) // 2] if file.suffix == ".safetensors" else data
        (folder / file.name).write_bytes(cut)
    backend = backend_of(study_of("engine", {"device": "cpu"}, folder), tmp_path)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        backend.open(backend.group(PLAIN))


def test_the_engine_starts_from_the_exported_file_and_decodes_as_measured(
    fp32: Backend, checkpoint: Path, tmp_path: Path
) -> None:
    study = study_of("engine", {"device": "cpu", "timeout_s": 200}, checkpoint)
    measured = {c: fp32.measure(PLAIN, workload(checkpoint, c), 0) for c in (1, 2)}
    chosen = {1: TREE, 2: PLAIN}
    levels = []
    for concurrency, baseline in measured.items():
        assert baseline.tokens_per_s is not None
        speed = Throughput(
            tokens_per_s=baseline.tokens_per_s,
            low=baseline.tokens_per_s * 0.9,
            high=baseline.tokens_per_s * 1.1,
            num_repeats=1,
        )
        levels.append(
            LevelBest(
                concurrency=concurrency,
                knobs=chosen[concurrency],
                trial=concurrency,
                measured=speed,
                baseline=speed,
                baseline_trial=0,
                output_check="exact",
            )
        )
    path = tmp_path / "best.yaml"
    provenance = fp32.provenance()
    options = LaunchOptions(device="cpu", dtype="float32", max_context=48, timeout_s=60.0)
    evidence = Evidence(
        study_id="1",
        machine_fingerprint=provenance.machine_fingerprint,
        noise_floor=0.01,
        database="sqlite://",
        commit=provenance.commit,
        config_hash=provenance.config_hash,
    )
    write_best(path, study, levels, options, evidence)
    config = load_config(path)
    assert config.speculation_at(1).num_tokens == 5
    assert config.speculation_at(2).method == "off"
    prompt = study_prompts(study, 1).token_ids[0]
    request = Request(prompt_ids=prompt, max_new_tokens=12, ignore_eos=True)
    with Engine(config) as engine:
        # None: the file's own schedule decides
        speculative = engine.generate([request], None, concurrency=1)
        plain = engine.generate([request] * 2, None, concurrency=2)
    assert speculative.counters.num_verifies > 0
    assert plain.counters.num_verifies == 0
    assert {r.token_ids for r in (*speculative.requests, *plain.requests)} == {
        speculative.requests[0].token_ids
    }


def test_an_exported_file_of_another_machine_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "best.yaml"
    speed = Throughput(tokens_per_s=1.0, low=1.0, high=1.0, num_repeats=1)
    level = LevelBest(
        concurrency=1,
        knobs=PLAIN,
        trial=1,
        measured=speed,
        baseline=speed,
        baseline_trial=0,
        output_check="exact",
    )
    options = LaunchOptions(device="cpu", dtype="float32", max_context=48, timeout_s=60.0)
    evidence = Evidence(
        study_id="1", machine_fingerprint="0123456789ab", noise_floor=None, database="sqlite://"
    )
    write_best(path, study_of("engine", {}, checkpoint), [level], options, evidence)
    assert yaml.safe_load(path.read_text())["machine_fingerprint"] == "0123456789ab"
    with pytest.raises(EngineError, match="--allow-other-machine"):
        load_config(path)
    assert load_config(path, allow_other_machine=True).tp == 1
