"""Diff: what differs, what it is worth, and the verdict, on trials and foreign runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from explain_database import Made, add_trial, knobs_of, make_study
from study_files import MACHINE

from autotune.cli.main import main
from autotune.diff.compare import Comparison, compare
from autotune.diff.differences import differences, gaps
from autotune.diff.measured import measured
from autotune.diff.resolve import Resolver
from autotune.diff.run import Run, Series
from autotune.errors import UserError
from autotune.records import Health, Provenance, RankEnvironment
from autotune.store.views import NoiseFloor

DATA = Path(__file__).parents[1] / "data" / "foreign"
CHAIN = {"speculation__method": "eagle3", "speculation__topk": 1, "speculation__steps": 2}


def provenance(**changes: object) -> Provenance:
    environment = {"NCCL_PROTO": "LL", "HOME": "/root", "SECRET_TOKEN": "x"}
    values: dict[str, object] = {
        "config": {"backend": "engine", "engine": {"dtype": "bfloat16", "tp": 8}},
        "config_hash": "h",
        "ranks": tuple(
            RankEnvironment(rank=rank, pid=rank, environment=dict(environment)) for rank in (0, 1)
        ),
        "commit": "a" * 40,
        "dirty": False,
        "packages": {"torch": "2.13.0", "triton": "3.7.1"},
        "python": "3.11.7",
        "driver": "580.1",
        "gpus": ("NVIDIA H200",) * 8,
        "pcie": ("gen 5 x16 (max gen 5 x16)",) * 8,
        "cpu": "Xeon",
        "health": (Health(device="cuda:0", clock_mhz=1980.0, temperature_c=50.0),),
    }
    return Provenance.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made = make_study(tmp_path_factory.mktemp("db"))
    add_trial(made, made.plan.baseline, role="baseline", repeats=8, provenance=provenance())
    add_trial(made, made.plan.baseline, role="aa", repeats=8, seed=1, provenance=provenance())
    add_trial(made, knobs_of(made, **CHAIN), repeats=8, provenance=provenance())
    graph = knobs_of(made, **CHAIN, cuda_graph__verify=True)
    add_trial(made, graph, repeats=8, provenance=provenance())
    # the same knobs as trial 3, 60 % slower attention, other driver and torch
    add_trial(
        made,
        graph,
        repeats=8,
        factors={"verify.attention": 4.0},
        provenance=provenance(driver="570.0", packages={"torch": "2.11.0", "triton": "3.7.1"}),
        seed=4,
    )
    # the same knobs and provenance, slower for no recorded reason
    slow = {"verify.attention": 4.0}
    add_trial(made, graph, repeats=8, factors=slow, provenance=provenance(), seed=5)
    # eager: the two modes of one configuration, in one trial and between two
    rng = np.random.default_rng(0)
    eager = knobs_of(made, **{**CHAIN, "speculation__steps": 3})
    fast = [float(100 * np.exp(rng.normal(0, 0.005))) for _ in range(8)]
    add_trial(made, eager, repeats=8, speeds=fast, provenance=provenance())
    low = [value / 1.55 for value in fast]
    add_trial(made, eager, repeats=8, speeds=low, provenance=provenance())
    made.store.set_noise_floor(made.view.id, NoiseFloor(1, 0.01, 6))
    return made


def diffed(made: Made, a: str, b: str) -> Comparison:
    resolver = Resolver(made.store.url, "made")
    return compare(resolver.run(a), resolver.run(b))


def test_an_a_a_pair_is_within_noise_and_nothing_differs(made: Made) -> None:
    found = diffed(made, "0", "made:1")
    assert found.differences == ()
    assert found.verdict.kind == "within noise"


def test_a_setting_that_explains_the_difference_is_named(made: Made) -> None:
    found = diffed(made, "0", "2")
    (tree,) = found.worths
    assert tree.title == "draft tree"
    assert found.predicted is not None
    assert found.measured is not None
    assert found.measured.faster.median == pytest.approx(found.predicted.median, rel=0.1)
    assert found.verdict.kind in ("explained", "possibly explained")
    assert "draft tree" in found.verdict.text


def test_a_change_of_packages_has_no_price_and_is_not_called_the_reason(made: Made) -> None:
    found = diffed(made, "3", "4")
    assert {(d.group, d.key) for d in found.differences} == {
        ("driver", "driver"),
        ("packages", "torch"),
    }
    assert all(worth.kind == "unknown" for worth in found.worths)
    assert found.verdict.kind == "not explained by what the model can price"
    assert "torch" in found.verdict.text
    assert found.measured is not None
    changed = [term.name for term in found.measured.terms if term.clear]
    assert changed[0] == "verify.attention"


def test_equal_runs_with_unequal_speed_are_not_explained_by_anything_recorded(made: Made) -> None:
    found = diffed(made, "3", "5")
    assert found.differences == ()
    assert found.verdict.kind == "not explained by anything recorded"


def test_two_modes_of_an_eager_configuration_are_recognised(made: Made) -> None:
    found = diffed(made, "6", "7")
    assert found.verdict.kind == "two modes of one configuration"
    assert "1.55" in found.verdict.text


def test_captured_steps_have_no_second_mode(made: Made) -> None:
    assert diffed(made, "3", "5").verdict.kind != "two modes of one configuration"


def _run(**changes: object) -> Run:
    base = Run(
        label="x",
        kind="trial",
        facts={"environment": {"NCCL_ALGO": "Ring"}, "packages": {"torch": "1"}},
        unknown={},
        series=(Series(concurrency=1, definition="decode", tokens_per_s=(1.0, 1.0, 1.01)),),
        knobs={},
        workload={},
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_what_one_side_does_not_tell_is_unknown_never_equal() -> None:
    a = _run()
    b = _run(facts={"environment": {}}, unknown={"packages": "the log does not tell"})
    assert differences(a, b) == ()
    told = {(gap.group, gap.side): gap for gap in gaps(a, b)}
    assert told["packages", "B"].why == "the log does not tell"
    assert ("environment", "B") in told
    assert told["driver", "A and B"].keys == ()


def test_a_variable_that_is_absent_from_a_known_environment_is_unset() -> None:
    b = _run(facts={"environment": {"OMP_NUM_THREADS": "1"}, "packages": {"torch": "1"}})
    found = {d.key: (d.a, d.b) for d in differences(_run(), b)}
    assert found == {"NCCL_ALGO": ("Ring", "unset"), "OMP_NUM_THREADS": ("unset", "1")}


def test_small_changes_of_clock_and_temperature_are_no_difference() -> None:
    def state(clock: str, temperature: str) -> Run:
        return _run(facts={"hardware state": {"clock_mhz": clock, "temperature_c": temperature}})

    assert differences(state("1980 MHz", "50 °C"), state("1965 MHz", "54 °C")) == ()
    (clock,) = differences(state("1980 MHz", "50 °C"), state("1410 MHz", "54 °C"))
    assert clock.key == "clock_mhz"


def test_ranks_that_disagree_are_shown_as_such(made: Made) -> None:
    from autotune.diff.facts import provenance_facts

    ranks = tuple(
        RankEnvironment(rank=rank, pid=rank, environment={"NCCL_PROTO": proto} if proto else {})
        for rank, proto in enumerate(("LL", ""))
    )
    facts, _ = provenance_facts(provenance(ranks=ranks))
    assert facts["environment"]["NCCL_PROTO"] == "rank 0: LL; rank 1: unset"


def test_secrets_and_unrelated_variables_are_not_shown() -> None:
    from autotune.diff.facts import provenance_facts

    ranks = (
        RankEnvironment(
            rank=0,
            pid=1,
            environment={"VLLM_API_KEY": "hunter2", "MY_TOKEN": "hunter3", "NCCL_ALGO": "Ring"},
        ),
    )
    facts, _ = provenance_facts(provenance(ranks=ranks))
    assert "hunter" not in json.dumps(facts)
    assert facts["environment"]["NCCL_ALGO"] == "Ring"


def test_a_wall_clock_speed_is_never_compared_with_a_decode_speed() -> None:
    gaps_ = Series(
        concurrency=1, definition="server interval with gaps", tokens_per_s=(50.0, 51.0, 49.0)
    )
    found, why = measured(_run(), _run(series=(gaps_,)), None)
    assert found is None
    assert "must not be compared" in why
    steps = replace(gaps_, cycle_ms=(10.0, 11.0))
    other = Series(concurrency=1, definition="decode", tokens_per_s=(9.0,), cycle_ms=(10.0, 10.5))
    found, _ = measured(_run(series=(other,)), _run(series=(steps,)), None)
    assert found is not None
    assert found.metric == "step time"


def test_loads_that_differ_are_refused() -> None:
    other = Series(concurrency=8, definition="decode", tokens_per_s=(50.0, 51.0))
    found, why = measured(_run(), _run(series=(other,)), None)
    assert found is None
    assert why == "no load in common (A: 1; B: 8)"


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *arguments, "--json"])
    assert ended.value.code == 0
    values = json.loads(capsys.readouterr().out)
    assert isinstance(values, dict)
    return values


def test_two_server_logs_are_compared_without_any_database(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = _json(
        capsys,
        str(DATA / "sglang-eagle3-graph.log"),
        str(DATA / "sglang-eagle3-eager.log"),
        "--machine",
        str(MACHINE),
        "--target",
        "kimi-k2.5",
    )
    assert values["a"]["format"] == "SGLang server log"  # type: ignore[index]
    what = {row["what"]: row for row in values["differences"]}  # type: ignore[attr-defined]
    assert what["cuda_graph.verify"]["worth"] == "predicted"
    # names, ports and seeds of a start are no difference
    assert not any("random_seed" in name or "port" in name for name in what)
    ratio = values["measured"]["faster"]  # type: ignore[index]
    assert ratio["median"] == pytest.approx(24.0 / 33.5, rel=0.03)
    assert values["verdict"] in ("explained", "possibly explained")
    unknown = {(gap["group"], gap["side"]) for gap in values["unknown"]}  # type: ignore[attr-defined]
    assert ("driver", "A and B") in unknown


def test_speculation_that_lost_is_split_into_acceptance_and_step_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = _json(capsys, str(DATA / "sglang-baseline.log"), str(DATA / "sglang-eagle3-graph.log"))
    seen = values["measured"]
    assert isinstance(seen, dict)
    assert seen["faster"]["median"] == pytest.approx(0.91, abs=0.03)
    assert seen["accept"]["median"] == pytest.approx(1.83, abs=0.06)
    assert seen["step"]["median"] == pytest.approx(12.1 / 24.0, abs=0.02)
    assert values["why_no_model"] == "no model: give --machine and --target"


def test_recorded_metrics_with_and_without_speculation_are_compared_by_time_per_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = _json(
        capsys, str(DATA / "vllm-metrics-baseline.txt"), str(DATA / "vllm-metrics-eagle3-k3.txt")
    )
    seen = values["measured"]
    assert isinstance(seen, dict)
    assert seen["metric"] == "time per output token"
    assert seen["faster"]["median"] == pytest.approx(3.3374 / 3.3824, abs=1e-3)
    assert "repeat it" in " ".join(values["record_next"])  # type: ignore[arg-type]


def test_a_trial_is_compared_with_a_foreign_log(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    values = _json(
        capsys, "made:2", str(DATA / "sglang-eagle3-eager.log"), "--database", made.store.url
    )
    assert values["measured"]["concurrency"] == 1  # type: ignore[index]
    assert values["why_no_model"] is None
    sides = {gap["side"] for gap in values["unknown"]}  # type: ignore[attr-defined]
    assert sides & {"B", "A and B"}


def test_the_table_keeps_to_a_hundred_columns(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["diff", "3", "4", "--database", made.store.url])
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "What differs" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0", "77"], "has no trial 77"),
        (["nope:0", "1"], "no study 'nope'"),
        (["0", "absent.log"], "no file absent.log"),
        (["0", "1", "--machine", "8x-l40s"], "--machine and --target go together"),
        (["0", "1", "--concurrency", "9"], ""),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str], message: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *arguments, "--database", made.store.url])
    out = capsys.readouterr()
    if message:
        assert ended.value.code == 2
        assert message in out.err
        assert len(out.err.splitlines()) == 1
    else:
        assert "Not comparable: concurrency 9 is not measured on both sides" in " ".join(
            out.out.split()
        )


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        Resolver("sqlite:///none.db").run(str(tmp_path))
