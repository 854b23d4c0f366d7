"""Replay: what was recorded comes back, what was not is refused with the nearest."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from contract_harness import context_of, knobs, measure_some, sim_harness, study_of

from autotune.backends.base import Backend
from autotune.backends.recording import Recorded, Recording, read_recording, write_recording
from autotune.backends.registry import create_backend
from autotune.errors import UserError
from autotune.schemas import Study
from autotune.store.store import Store
from model.spec import Knobs, Workload

CHAIN = knobs(2, "nccl", method="eagle3", steps=3, topk=1)
PLAIN = knobs(2, "nccl")


def recorded(tmp_path: Path, count: int = 3) -> tuple[Recording, Workload]:
    source = sim_harness(tmp_path)
    repeats = [
        Recorded(each, source.workload, measured)
        for each in (PLAIN, CHAIN)
        for measured in measure_some(source.backend, each, source.workload, count)
    ]
    return Recording(tuple(repeats), source.backend.provenance()), source.workload


def replaying(tmp_path: Path, recording: Recording) -> Backend:
    path = tmp_path / "results" / "recorded.jsonl"
    write_recording(path, recording)
    study = study_of("replay", {"path": "results/recorded.jsonl"}, None)
    backend = create_backend("replay", context_of(study, tmp_path))
    backend.open(backend.group(PLAIN))
    return backend


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path)
    path = tmp_path / "r.jsonl"
    write_recording(path, recording)
    assert read_recording(path) == recording


def test_repeats_come_back_in_order_and_unchanged(tmp_path: Path) -> None:
    recording, workload = recorded(tmp_path)
    backend = replaying(tmp_path, recording)
    served = [backend.measure(CHAIN, workload, repeat) for repeat in range(3)]
    assert served == [r.measurement for r in recording.repeats if r.knobs == CHAIN]
    assert backend.provenance() == recording.provenance


def test_a_replayed_recording_can_be_recorded_again(tmp_path: Path) -> None:
    recording, workload = recorded(tmp_path)
    backend = replaying(tmp_path, recording)
    again = Recording(
        tuple(
            Recorded(each, workload, backend.measure(each, workload, repeat))
            for each in (PLAIN, CHAIN)
            for repeat in range(3)
        ),
        backend.provenance(),
    )
    assert again == recording


def test_more_repeats_than_recorded_are_redrawn_and_say_so(tmp_path: Path) -> None:
    recording, workload = recorded(tmp_path)
    backend = replaying(tmp_path, recording)
    extra = [backend.measure(CHAIN, workload, repeat) for repeat in range(3, 30)]
    known = {r.measurement.tokens_per_s for r in recording.repeats if r.knobs == CHAIN}
    assert {m.tokens_per_s for m in extra} == known
    assert all(any(note.startswith("resampled") for note in m.notes) for m in extra)
    assert [m.repeat for m in extra] == list(range(3, 30))
    assert extra[0] == backend.measure(CHAIN, workload, 3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        pytest.param(
            knobs(2, "nccl", method="eagle3", steps=4, topk=1),
            rf"nearest recorded knobs {CHAIN.id} have speculation\.draft_tokens 4 \(asked 5\), "
            r"speculation\.steps 3 \(asked 4\)",
            id="deeper-chain",
        ),
        pytest.param(
            Knobs.of({**PLAIN.values(), "nccl.proto": "LL"}),
            rf"nearest recorded knobs {PLAIN.id} have nccl\.proto auto \(asked LL\)",
            id="another-protocol",
        ),
    ],
)
def test_unknown_knobs_are_invalid_and_name_the_nearest(
    tmp_path: Path, asked: Knobs, message: str
) -> None:
    recording, workload = recorded(tmp_path)
    measured = replaying(tmp_path, recording).measure(asked, workload, 0)
    assert measured.failure is not None
    assert measured.failure.kind == "invalid"
    assert re.search(message, measured.failure.message), measured.failure.message


def test_another_level_or_length_is_invalid_and_says_what_is_recorded(tmp_path: Path) -> None:
    recording, workload = recorded(tmp_path)
    backend = replaying(tmp_path, recording)
    level = backend.measure(CHAIN, replace(workload, concurrency=32), 0).failure
    length = backend.measure(CHAIN, replace(workload, output_len=99), 0).failure
    assert level is not None
    assert level.message.endswith("recorded concurrency: 2")
    assert length is not None
    assert (
        length.message
        == f"these knobs were recorded with output_len {workload.output_len} (asked 99)"
    )


def test_other_prompts_are_served_with_a_note(tmp_path: Path) -> None:
    recording, workload = recorded(tmp_path)
    measured = replaying(tmp_path, recording).measure(
        CHAIN, replace(workload, prompts_sha256="other"), 0
    )
    assert measured.failure is None
    assert "recorded on other prompts than this study's" in measured.notes


@pytest.mark.parametrize(
    ("changes", "constraints", "kind"),
    [
        pytest.param({"output_check": "incorrect"}, {}, "incorrect", id="wrong-output"),
        pytest.param({"output_check": "incorrect"}, {"lossless": False}, None, id="allowed-to-be"),
        pytest.param({"memory_gib": 9.0}, {"max_memory_gib": 8}, "oom", id="too-heavy"),
        pytest.param({"memory_gib": 9.0}, {"max_memory_gib": 10}, None, id="light-enough"),
        pytest.param({}, {"max_memory_gib": 8}, None, id="memory-unknown"),
    ],
)
def test_a_recorded_repeat_is_judged_by_the_constraints_of_the_study_that_replays_it(
    tmp_path: Path, changes: dict[str, object], constraints: dict[str, object], kind: str | None
) -> None:
    recording, workload = recorded(tmp_path, count=1)
    repeats = tuple(
        replace(r, measurement=r.measurement.model_copy(update={"failure": None, **changes}))
        for r in recording.repeats
    )
    path = tmp_path / "recorded.jsonl"
    write_recording(path, Recording(repeats, recording.provenance))
    study = study_of("replay", {"path": path.name}, None)
    study = Study.model_validate(study.model_dump(mode="json") | {"constraints": constraints})
    backend = create_backend("replay", context_of(study, tmp_path))
    backend.open(backend.group(CHAIN))
    served = backend.measure(CHAIN, workload, 0)
    assert (served.failure and served.failure.kind) == kind
    assert served.tokens_per_s is not None


def _line(tmp_path: Path, **changes: object) -> str:
    recording, _ = recorded(tmp_path, count=1)
    path = tmp_path / "line.jsonl"
    write_recording(path, Recording(recording.repeats[:1]))
    return json.dumps(json.loads(path.read_text()) | changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        pytest.param({"kind": "trial"}, r"line 2: kind 'trial' is neither", id="kind"),
        pytest.param({"knobs": {"speculation.method": "off"}}, "line 2: the measurement belongs to",
                     id="other-knobs"),
        pytest.param({"knobs": {"spec": 1}}, "line 2: unknown knob 'spec'", id="unknown-knob"),
        pytest.param({"measurement": {"trial": "x"}}, r"line 2: trial: .*\(got 'x'\)", id="field"),
    ],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, changes: dict[str, object], match: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(_line(tmp_path) + "\n" + _line(tmp_path, **changes) + "\n")
    with pytest.raises(UserError, match=match):
        read_recording(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        pytest.param("", "holds no measurement", id="empty"),
        pytest.param("{oops\n", r"line 1: no JSON", id="no-json"),
        pytest.param('{"a": 1}\n', r"line 1: the key 'kind' is missing", id="no-kind"),
        pytest.param(None, r"nowhere\.jsonl: No such file", id="missing-file"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(
    tmp_path: Path, text: str | None, match: str
) -> None:
    path = tmp_path / "nowhere.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=match):
        create_backend(
            "replay", context_of(study_of("replay", {"path": str(path)}, None), tmp_path)
        )


@pytest.mark.parametrize(
    ("args", "match"),
    [
        pytest.param({}, r"give either path or database; .*\{path: FILE\.jsonl\}", id="nothing"),
        pytest.param(
            {"path": "a", "database": "sqlite:///a", "study": "s"}, "give either", id="two"
        ),
        pytest.param({"database": "sqlite:///a"}, "go together", id="no-study"),
        pytest.param({"file": "a"}, r"backend\.args\.file: Extra", id="unknown"),
    ],
)
def test_wrong_arguments_say_what_replay_takes(
    tmp_path: Path, args: dict[str, object], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        create_backend("replay", context_of(study_of("replay", args, None), tmp_path))


def test_a_studys_database_is_a_recording(tmp_path: Path) -> None:
    recording, workload = recorded(tmp_path)
    url = f"sqlite:///{tmp_path}/study.db"
    store = Store.create(url)
    view = store.add_study(
        name="kept", text="", label="", base_dir=tmp_path, machine=None, workloads={2: workload}
    )
    worker = store.add_worker(view.id)
    for number, each in enumerate((PLAIN, CHAIN)):
        trial = store.claim_trial(
            study_id=view.id,
            claim=f"search:{each.id}",
            role="search",
            origin="test",
            knobs=each,
            group_id=None,
            worker_id=worker,
        )
        assert trial is not None
        store.set_number(trial, number)
        for row in recording.repeats:
            if row.knobs == each:
                placed = row.measurement.model_copy(update={"trial": number})
                store.add_measurement(view.id, trial, placed)
        assert recording.provenance is not None
        store.set_provenance(trial, recording.provenance)
    args = {"database": url, "study": "kept"}
    backend = create_backend("replay", context_of(study_of("replay", args, None), tmp_path))
    backend.open(backend.group(PLAIN))
    served = [backend.measure(CHAIN, workload, repeat) for repeat in range(3)]
    assert served == [r.measurement for r in recording.repeats if r.knobs == CHAIN]
    assert backend.provenance() == recording.provenance
