"""The selector's table, choices and channels; published behaviour of other hosts."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.machine import Machine, load_machine
from model.nccl.communicator import communicator_for
from model.nccl.selector import Selector, scheduled_channels
from model.nccl.settings import NcclSettings
from model.nccl.tuning import BALANCED_TREE, RING, Communicator, Graph, thread_limit
from model.nccl.versions import KNOWN_VERSIONS, release_for

MACHINES = Path(__file__).parents[2] / "studies" / "machines"
KIB, MIB = 1 << 10, 1 << 20


def graph(pattern: int, channels: int, bandwidth: float, kind: str = "PHB") -> Graph:
    return Graph(
        pattern=pattern, num_channels=channels, bw_intra=bandwidth, bw_inter=bandwidth,
        type_intra=kind, type_inter="PIX", same_channels=True,
    )  # fmt: skip


def communicator(
    num_ranks: int = 8,
    ring: float = 20.0,
    *,
    kind: str = "PHB",
    capability: int = 120,
    version: str = "2.28.9",
    channels: int = 4,
    env: dict[str, str] | None = None,
) -> Communicator:
    return Communicator(
        release=release_for(version), num_ranks=num_ranks, num_nodes=1, min_cc=capability,
        max_cc=capability, cpu_vendor="intel", ring=graph(RING, 2, ring / 2, kind),
        tree=graph(BALANCED_TREE, 2, ring / 2, kind), nvls=None, num_channels=channels,
        nvls_channels=0, settings=NcclSettings.from_env(env or {}), transport="SHM",
    )  # fmt: skip


def direct_intel() -> Machine:
    """8 x RTX PRO 6000, four per socket on root ports of Sapphire Rapids."""
    values: dict[str, Any] = yaml.safe_load((MACHINES / "8x-rtx-pro-6000-direct.yaml").read_text())
    values["cpu"] |= {"vendor": "intel", "model": "Xeon", "generation": "SPR"}
    return Machine.from_dict(values)


@pytest.mark.parametrize(
    ("num_ranks", "ring", "tree"),
    [
        (8, (20.6, 49.0, 88.2), (20.8, 40.6, 64.4)),
        (4, (12.6, 29.0, 42.6), (12.8, 25.4, 32.4)),
        (2, (8.6, 19.0, 19.8), (8.8, 17.8, 16.4)),
    ],
)
def test_latencies_over_pcie(
    num_ranks: int, ring: tuple[float, ...], tree: tuple[float, ...]
) -> None:
    table = Selector(communicator(num_ranks)).table
    for algo, expected in (("ring", ring), ("tree", tree)):
        found = [table[algo, proto].latency_us for proto in ("LL", "LL128", "Simple")]
        assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("kind", "env", "on"),
    [
        pytest.param("PHB", {}, False, id="off-over-pcie"),
        pytest.param("PIX", {}, False, id="off-behind-a-switch"),
        pytest.param("NVL", {}, True, id="on-over-nvlink"),
        pytest.param("PHB", {"NCCL_PROTO": "LL128"}, True, id="on-when-named"),
        pytest.param("PHB", {"NCCL_PROTO": "^LL"}, True, id="on-when-others-are-excluded"),
        pytest.param("NVL", {"NCCL_PROTO": "LL,Simple"}, False, id="off-when-not-named"),
    ],
)
def test_ll128_is_on_by_default_only_over_nvlink(kind: str, env: dict[str, str], on: bool) -> None:
    table = Selector(communicator(kind=kind, env=env)).table
    assert (table["ring", "LL128"].bandwidth > 0) is on


@pytest.mark.parametrize(
    ("version", "per_channel"),
    [("2.27.5", 73.4), ("2.28.9", 73.4), ("2.29.2", 34.5), ("2.29.7", 40.0), ("2.30.7", 40.0)],
)
def test_blackwell_ll128_cap_follows_the_release(version: str, per_channel: float) -> None:
    # two channels so wide that only the cap binds; 2 ranks: algorithm bandwidth = bus bandwidth
    comm = communicator(2, 4000.0, version=version, env={"NCCL_PROTO": "LL128"})
    found = Selector(comm).table["ring", "LL128"].bandwidth
    assert found == pytest.approx(2 * per_channel, rel=1e-6)


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_dual_socket_amd_finds_no_ring_and_leaves_ll_at_4_kib(version: str) -> None:
    machine = load_machine(MACHINES / "8x-rtx-pro-6000-direct.yaml")
    comm = communicator_for(machine, 8, NcclSettings(), version)
    assert (comm.ring.num_channels, comm.ring.bw_intra, comm.ring.type_intra) == (1, 0.1, "SYS")
    selector = Selector(comm)
    assert selector.choose(2 * KIB).proto == "LL"
    assert selector.choose(4 * KIB).proto == "Simple"
    # a decode step of Kimi-K2.5 (one token, 14 KiB) runs Simple there
    assert selector.choose(14336).proto == "Simple"


@pytest.mark.parametrize(
    ("num_ranks", "last_ll", "first_simple"),
    [(8, 512 * KIB, MIB), (4, 512 * KIB, MIB), (2, 256 * KIB, 512 * KIB)],
)
def test_rtx_pro_6000_switch_points_as_published(
    num_ranks: int, last_ll: int, first_simple: int
) -> None:
    selector = Selector(communicator_for(direct_intel(), num_ranks, NcclSettings(), "2.29.2"))
    assert selector.choose(last_ll).proto == "LL"
    assert selector.choose(first_simple).proto == "Simple"


def test_two_switches_switch_protocol_between_half_and_one_mib() -> None:
    machine = load_machine(MACHINES / "8x-rtx-pro-6000-switches.yaml")
    selector = Selector(communicator_for(machine, 8, NcclSettings(), "2.29.2"))
    assert [c.proto for _, c in selector.switch_points(8, 64 * MIB)] == ["LL", "Simple"]
    assert selector.choose(512 * KIB).proto == "LL"
    assert selector.choose(MIB).proto == "Simple"


def test_the_story_chooses_the_same_with_and_without_its_six_variables() -> None:
    machine = load_machine(MACHINES / "2x-h200-shm.yaml")
    story = {
        "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS",
        "NCCL_MAX_NCHANNELS": "16", "NCCL_BUFFSIZE": "16777216", "NCCL_NTHREADS": "512",
    }  # fmt: skip
    plain, forced = (
        Selector(communicator_for(machine, 2, NcclSettings.from_env(env), "2.28.9"))
        for env in ({}, story)
    )
    for size in (14336, 3 * 14336, 65536):
        assert forced.choose(size) == plain.choose(size)
    # harmful where NCCL would leave LL
    assert plain.choose(64 * 14336).proto == "Simple"
    assert forced.choose(64 * 14336).proto == "LL"


def test_a_list_that_leaves_nothing_is_refused_with_the_settings() -> None:
    selector = Selector(communicator(env={"NCCL_ALGO": "NVLS"}))
    with pytest.raises(ValueError, match="NCCL_ALGO=NVLS") as caught:
        selector.choose(1024)
    assert "1024 bytes" in str(caught.value)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_byte_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        Selector(communicator()).choose(size)


@pytest.mark.parametrize(
    ("asked", "threads"),
    [(None, 512), (0, 512), (-5, 512), (64, 64), (100, 512), (1024, 512), (32, 64), (96, 96)],
)
def test_thread_counts_fall_back_as_nccl_does(asked: int | None, threads: int) -> None:
    assert thread_limit(asked, 64, 512, 512) == threads


def test_slow_rings_run_simple_with_256_threads() -> None:
    assert Selector(communicator(ring=12.0)).table["ring", "Simple"].max_threads == 256
    assert Selector(communicator(ring=13.0)).table["ring", "Simple"].max_threads == 512


def test_one_channel_per_32_kib_of_ll_at_eight_ranks() -> None:
    selector = Selector(communicator(8, channels=16, env={"NCCL_PROTO": "LL"}))
    threads = {size: selector.choose(size).threads for size in (8 * KIB, 16 * KIB, 32 * KIB)}
    assert threads == {8 * KIB: 128, 16 * KIB: 256, 32 * KIB: 512}
    assert selector.choose(32 * KIB).channels == 1
    assert selector.choose(128 * KIB).channels == 4


def random_communicator(chance: random.Random) -> Communicator:
    env = {
        "NCCL_PROTO": chance.choice(["LL", "LL128", "Simple", "^LL", "LL,Simple"]),
        "NCCL_ALGO": chance.choice(["Ring", "Tree", "ring,tree"]),
    }
    return communicator(
        chance.choice([2, 3, 4, 8]), chance.choice([0.2, 6.0, 24.0, 48.0, 400.0]),
        kind=chance.choice(["PIX", "PHB", "SYS", "NVL"]), capability=chance.choice([80, 90, 120]),
        version=chance.choice(KNOWN_VERSIONS), channels=chance.randint(1, 64), env=env,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_choices_stay_within_their_limits(seed: int) -> None:
    chance = random.Random(seed)
    comm = random_communicator(chance)
    selector = Selector(comm)
    used = 0
    last: tuple[str, str] | None = None
    for size in sorted(chance.randint(1, 64 * MIB) for _ in range(60)):
        choice = selector.choose(size)
        assert 1 <= choice.channels <= comm.num_channels
        assert 96 <= choice.threads <= 640
        assert choice.threads % 32 == 0
        times = [
            time
            for algo, proto in selector.table
            if (time := selector.model_time_us(algo, proto, size)) is not None
        ]
        assert choice.model_time_us == min(times)
        if last == (choice.algo, choice.proto):
            # with one protocol, more bytes never use fewer channels by more than rounding
            assert choice.channels >= used - max(2, used // 4)
        last, used = (choice.algo, choice.proto), choice.channels


@pytest.mark.parametrize("version", ["2.28.9", "2.29.2"])
@pytest.mark.parametrize("proto", ["LL", "Simple"])
@pytest.mark.parametrize("size", [1, 100, 16 * KIB, 100_000, 917_504, 64 * MIB])
def test_scheduling_gives_every_byte_a_channel(version: str, proto: str, size: int) -> None:
    comm = replace(communicator(channels=24), release=release_for(version))
    for channels in (1, 2, 7, 24):
        used = scheduled_channels(comm, size, proto, channels, 24)
        assert 1 <= used <= 24
        if size <= comm.release.min_traffic_bytes // 8:
            assert used == 1


def test_channels_above_what_exists_are_refused() -> None:
    with pytest.raises(ValueError, match="num_channels 65"):
        communicator(channels=65)


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks 1 must be at least 2"):
        communicator(1)
