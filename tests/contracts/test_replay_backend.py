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


def test_replay_without_a_path_says_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"backend\.args\.path: .*\{path: FILE\.jsonl\}"):
        create_backend("replay", context_of(study_of("replay", {}, None), tmp_path))
