"""All-reduce time, analytic and discrete-event: limits, monotonicity, refusals, cache, speed."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from model.allreduce.analytic import time_us
from model.allreduce.constants import ALL_SPECS, PREFIX
from model.allreduce.design import Design
from model.allreduce.hops import hop_between, ring_hops
from model.allreduce.model import AllreduceModel, constants, prior_constants
from model.allreduce.simulate_direct import simulate_direct
from model.allreduce.simulator import AllreduceSimulator
from model.machine import Machine, load_machine
from model.nccl.settings import NcclSettings

MACHINES = Path(__file__).parents[2] / "studies" / "machines"
PRIOR = prior_constants()
SWITCHES = load_machine(MACHINES / "8x-rtx-pro-6000-switches.yaml")
DIRECT = load_machine(MACHINES / "8x-rtx-pro-6000-direct.yaml")
SHM = load_machine(MACHINES / "2x-h200-shm.yaml")
NVLINK = load_machine(MACHINES / "2x-h200-nvlink.yaml")
CPU = load_machine(MACHINES / "cpu-2core.yaml")
SIZES = [4096, 14336, 65536, 262144, 1 << 20, 8 << 20]


def model(
    machine: Machine, ranks: int, env: dict[str, str] | None = None, backend: str = "nccl"
) -> AllreduceModel:
    return AllreduceModel(machine, ranks, backend, NcclSettings.from_env(env or {}), None, PRIOR)


def simulator(
    machine: Machine,
    ranks: int,
    env: dict[str, str] | None = None,
    backend: str = "nccl",
    cache: bool = True,
) -> AllreduceSimulator:
    settings = NcclSettings.from_env(env or {})
    return AllreduceSimulator(machine, ranks, backend, settings, None, PRIOR, cache)


@pytest.mark.parametrize(
    ("machine", "ranks", "env"),
    [
        pytest.param(SWITCHES, 2, {}, id="2-behind-one-switch"),
        pytest.param(DIRECT, 4, {}, id="4-through-one-sockets-memory"),
        pytest.param(DIRECT, 4, {"NCCL_PROTO": "LL128"}, id="LL128"),
        pytest.param(SHM, 2, {}, id="host-memory"),
        pytest.param(NVLINK, 2, {}, id="nvlink"),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_where_all_hops_are_alike_the_simulation_is_the_analytic_form(
    machine: Machine, ranks: int, env: dict[str, str], size: int
) -> None:
    analytic = model(machine, ranks, env).time_us([size], graphed=True)[0]
    assert simulator(machine, ranks, env).duration_us(size) == pytest.approx(analytic, rel=1e-6)


@pytest.mark.parametrize(
    ("machine", "env", "tolerance"),
    [
        pytest.param(SWITCHES, {}, 0.08, id="two-switches-ring"),
        pytest.param(SWITCHES, {"NCCL_P2P_LEVEL": "SYS"}, 0.08, id="peer-writes-across-sockets"),
        pytest.param(DIRECT, {"NCCL_PROTO": "LL"}, 0.08, id="direct-attached-host-memory"),
        pytest.param(SWITCHES, {"NCCL_ALGO": "Tree"}, 0.16, id="tree"),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_over_unlike_hops_simulation_and_analytic_form_stay_close(
    machine: Machine, env: dict[str, str], tolerance: float, size: int
) -> None:
    analytic = model(machine, 8, env).time_us([size], graphed=True)[0]
    assert simulator(machine, 8, env).duration_us(size) == pytest.approx(analytic, rel=tolerance)


@pytest.mark.parametrize("kind", ["one_shot", "two_shot"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_direct_kernels_agree_in_both_forms(kind: str, ranks: int) -> None:
    for size in SIZES:
        analytic = model(SWITCHES, ranks, backend=kind).time_us([size], graphed=True)[0]
        simulated = simulator(SWITCHES, ranks, backend=kind).duration_us(size)
        assert simulated == pytest.approx(analytic, rel=0.02)


def test_gloo_agrees_in_both_forms_and_needs_no_gpu() -> None:
    analytic = model(CPU, 2, backend="gloo").time_us(SIZES, graphed=False)
    simulated = [simulator(CPU, 2, backend="gloo").duration_us(size) for size in SIZES]
    assert simulated == pytest.approx(analytic)


@pytest.mark.parametrize("env", [{}, {"NCCL_PROTO": "LL"}, {"NCCL_PROTO": "Simple"}], ids=str)
def test_more_bytes_take_longer_while_protocol_channels_and_threads_stay(
    env: dict[str, str],
) -> None:
    run = model(SWITCHES, 8, env)
    sizes = [2**k for k in range(10, 27)]
    design, times = run.design(sizes), run.time_us(sizes, graphed=True)
    kinds = np.stack([design.channels, design.simple, design.pass_bytes])
    alike = (np.diff(kinds) == 0).all(axis=0)
    assert alike.sum() > 8
    assert (np.diff(times)[alike] > 0).all()


def test_slower_transport_takes_longer_at_every_size() -> None:
    nvlink = model(NVLINK, 2).time_us(SIZES, graphed=True)
    shared = model(SHM, 2).time_us(SIZES, graphed=True)
    assert (shared > nvlink).all()


def test_eager_is_never_below_graphed_nor_the_hosts_call() -> None:
    fast = model(SWITCHES, 2)
    eager = fast.time_us(SIZES, graphed=False)
    assert (eager >= fast.time_us(SIZES, graphed=True)).all()
    assert eager.min() == PRIOR[PREFIX + "call_us"]


def test_the_machine_decides_the_transport_of_each_hop() -> None:
    ring = ring_hops(SWITCHES, range(8), None)
    assert [hop.transport for hop in ring] == ["p2p", "shm"] * 4
    assert {hop.transport for hop in ring_hops(SWITCHES, range(8), "SYS")} == {"p2p"}
    assert {hop.transport for hop in ring_hops(SWITCHES, range(8), "LOC")} == {"shm"}
    assert hop_between(SHM, 0, 1, None, 2).transport == "shm"
    assert hop_between(NVLINK, 0, 1, None, 2).transport == "nvlink"


def test_a_late_rank_delays_all_others_by_at_most_its_lateness() -> None:
    together = simulator(SWITCHES, 8).finish_us(14336, (0.0,) * 8)
    late = simulator(SWITCHES, 8).finish_us(14336, (0.0,) * 5 + (30.0,) + (0.0,) * 2)
    assert max(late) > max(together)
    assert max(late) <= max(together) + 30.0 + 1e-6
    shifted = simulator(SWITCHES, 8).finish_us(14336, (100.0,) * 8)
    assert shifted == pytest.approx([100.0 + at for at in together])


def test_cache_off_equals_cache_on_and_reuses_identical_collectives() -> None:
    cached, plain = simulator(SWITCHES, 8), simulator(SWITCHES, 8, cache=False)
    for arrivals in ((0.0,) * 8, tuple(float(r) for r in range(8)), (5.0,) * 8):
        first = cached.finish_us(28672, arrivals)
        assert first == plain.finish_us(28672, arrivals) == cached.finish_us(28672, arrivals)
    assert cached._cache is not None
    assert len(cached._cache) == 2


def test_an_uncached_collective_takes_a_few_events_a_hop(
    counted_events: Callable[..., int],
) -> None:
    # its 100 ms are a bar of `make bench-model`; the events are what they are made of
    env = {"NCCL_MIN_NCHANNELS": "4", "NCCL_MAX_NCHANNELS": "4"}
    run = simulator(SWITCHES, 8, env, cache=False)
    hops = 8 * 4 * 2 * (8 - 1)
    assert hops < counted_events(lambda: run.duration_us(1 << 20)) <= 8 * hops


def test_posted_writes_from_one_switch_to_several_root_ports_collapse_and_reads_do_not() -> None:
    machine = SWITCHES
    values = machine.to_dict()
    none = Machine.from_dict(
        values
        | {
            "p2p": values["p2p"]
            | {"posted_write_collapse_sources": None, "posted_write_collapse_gb_per_s": None}
        }
    )

    def took(host: Machine, ranks: int, push: bool) -> float:
        start = (0.0,) * ranks
        return max(simulate_direct(host, ranks, 1 << 20, "one_shot", PRIOR, start, push))

    assert took(machine, 8, push=False) == pytest.approx(took(none, 8, push=False))
    assert took(machine, 8, push=True) > 3.0 * took(none, 8, push=True)
    # two GPUs behind one switch never leave it
    assert took(machine, 2, push=True) == pytest.approx(took(none, 2, push=True))
    # a ring has one destination per GPU
    ring = [simulator(host, 8, {"NCCL_P2P_LEVEL": "SYS"}) for host in (machine, none)]
    assert ring[0].duration_us(1 << 20) == pytest.approx(ring[1].duration_us(1 << 20))


def test_every_constant_has_a_unit_a_source_and_is_used() -> None:
    specs = constants()
    assert len({spec.name for spec in specs}) == len(specs) == len(ALL_SPECS)
    assert all(spec.unit and spec.source for spec in specs)
    host = load_machine(MACHINES / "8x-l40s.yaml")
    runs = [
        model(SWITCHES, 8), model(SWITCHES, 8, {"NCCL_PROTO": "LL128"}), model(NVLINK, 2),
        model(SHM, 2), model(SWITCHES, 8, backend="one_shot"), model(host, 8),
    ]  # fmt: skip
    sizes = [2**k for k in range(10, 30)]
    designs = [run.design(sizes) for run in runs] + [model(CPU, 2, backend="gloo").design(sizes)]
    base = np.concatenate([time_us(design, PRIOR) for design in designs])
    for spec in specs:
        if spec.name.endswith("call_us"):
            continue
        # in-flight bytes of these machines only reach a small cache
        changed = PRIOR | {PREFIX + "host_cache_mib": 4.0} if "cache" in spec.name else PRIOR
        if "spill" in spec.name:
            changed = PRIOR | {PREFIX + "host_cache_mib": 1.0, PREFIX + "socket_gb_per_s": 2.0}
            base_spill = np.concatenate([time_us(design, changed) for design in designs])
            doubled = changed | {spec.name: 2 * spec.prior}
            moved = np.concatenate([time_us(design, doubled) for design in designs])
            assert not np.allclose(moved, base_spill)
            continue
        if "cache" in spec.name or "socket" in spec.name:
            small = {PREFIX + "socket_gb_per_s": 2.0}
            before = np.concatenate([time_us(d, PRIOR | small) for d in designs])
            after = np.concatenate([time_us(d, PRIOR | small | {spec.name: 1.0}) for d in designs])
            assert not np.allclose(before, after), spec.name
            continue
        doubled = PRIOR | {spec.name: 2 * spec.prior}
        moved = np.concatenate([time_us(design, doubled) for design in designs])
        assert not np.allclose(moved, base), spec.name


def test_many_constants_at_once_give_what_each_gives_alone() -> None:
    design = Design.concat([model(SWITCHES, 8).design(SIZES), model(SHM, 2).design(SIZES)])
    factors = np.array([0.8, 1.0, 1.3])
    columns = {name: value * factors[:, None] for name, value in PRIOR.items()}
    together = time_us(design, columns)
    for row, factor in zip(together, factors, strict=True):
        alone = time_us(design, {name: value * factor for name, value in PRIOR.items()})
        assert row == pytest.approx(alone)
    kept = design.take(np.array([0, 3]))
    assert len(kept) == 2
    assert {f.name for f in fields(kept)} == {f.name for f in fields(design)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"ranks": 1}, "num_ranks 1", id="one-rank"),
        pytest.param({"ranks": 9}, "8 GPUs", id="more-ranks-than-gpus"),
        pytest.param({"backend": "mpi"}, "mpi.*known: nccl", id="unknown-backend"),
        pytest.param({"size": 0}, "size_bytes 0", id="zero-bytes"),
        pytest.param({"size": -4096}, "size_bytes -4096", id="negative-bytes"),
        pytest.param({"size": float("nan")}, "size_bytes nan", id="nan-bytes"),
        pytest.param({"version": "3.0.0"}, "3.0.0", id="unknown-nccl-version"),
        pytest.param({"machine": CPU, "ranks": 2}, "no GPU", id="nccl-without-gpu"),
    ],
)
def test_what_cannot_be_is_refused_naming_the_value(change: dict[str, object], words: str) -> None:
    values: dict[str, object] = {
        "machine": SWITCHES, "ranks": 8, "backend": "nccl", "size": 4096, "version": None,
    }  # fmt: skip
    values |= change
    run = AllreduceModel(
        values["machine"],  # type: ignore[arg-type]
        values["ranks"],  # type: ignore[arg-type]
        values["backend"],  # type: ignore[arg-type]
        NcclSettings(),
        values["version"],  # type: ignore[arg-type]
        PRIOR,
    )
    with pytest.raises(ValueError, match=words):
        run.time_us([values["size"]], graphed=True)


def test_arrival_times_must_be_one_per_rank() -> None:
    with pytest.raises(ValueError, match="7 arrival times for 8 ranks"):
        simulator(SWITCHES, 8).finish_us(4096, (0.0,) * 7)
