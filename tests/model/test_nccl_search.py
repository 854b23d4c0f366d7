"""NCCL's graph search on its own printed topologies and on machine files."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from plain_nccl_search import PlainSearch, Plan

from model.machine import Machine, load_machine
from model.nccl.channels import Candidate, ChannelLayer, Hopeless
from model.nccl.communicator import communicator_for
from model.nccl.hops import Hops
from model.nccl.paths import PATH_TYPES, nvlink_gb_per_s, pcie_gb_per_s, socket_gb_per_s
from model.nccl.search import GraphSearch, _search, search, search_all
from model.nccl.settings import NcclSettings
from model.nccl.topology import NcclTopology, P2pRule, topology_from_log, topology_of
from model.nccl.tuning import BALANCED_TREE, NVLS, RING, Graph
from model.nccl.versions import KNOWN_VERSIONS, release_for

DATA = Path(__file__).parents[1] / "data" / "nccl_logs"
MACHINES = Path(__file__).parents[2] / "studies" / "machines"
DEFAULT = P2pRule(level=None)
PREFIX = re.compile(r"^\S+ \[\d+\] NCCL INFO ")
PATTERN = re.compile(
    r"Pattern (\d+), crossNic 0, nChannels (\d+), bw ([\d.]+)/[\d.]+, type (\w+)/\w+, "
    r"sameChannels ([01])"
)


def printed(name: str) -> tuple[list[str], list[tuple[int, int, float, str, bool]]]:
    """Topology lines and graphs of a log."""
    lines = [PREFIX.sub("", x) for x in (DATA / f"{name}.rank0.log").read_text().splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("=== System"))
    end = next(i for i, line in enumerate(lines) if line.startswith("====="))
    found = [match.groups() for line in lines if (match := PATTERN.match(line))]
    graphs = [(int(p), int(n), float(bw), t, same == "1") for p, n, bw, t, same in found]
    return lines[begin:end], graphs


def summary(graph: Graph) -> tuple[int, int, float, str, bool]:
    bandwidth = graph.bw_intra
    return graph.pattern, graph.num_channels, bandwidth, graph.type_intra, graph.same_channels


@pytest.mark.parametrize(
    ("name", "level"),
    [("nvlink_default", None), ("shm_default", 0), ("shm_ring_LL_c16", 0), ("shm_seed", 0)],
)
def test_search_on_the_printed_topology_gives_the_printed_graphs(
    name: str, level: int | None
) -> None:
    lines, graphs = printed(name)
    topo = topology_from_log(lines, 90, P2pRule(level))
    assert [summary(graph) for graph in search_all(topo, release_for("2.28.9"))] == graphs


@pytest.mark.parametrize(
    ("machine", "name"), [("2x-h200-nvlink", "nvlink_default"), ("2x-h200-shm", "shm_default")]
)
def test_machine_files_give_the_graphs_of_their_logs(machine: str, name: str) -> None:
    comm = communicator_for(load_machine(MACHINES / f"{machine}.yaml"), 2, NcclSettings(), "2.28.9")
    assert [summary(comm.ring), summary(comm.tree)] == printed(name)[1]


@pytest.mark.parametrize(
    ("machine", "num_ranks", "ring", "transport"),
    [
        ("8x-rtx-pro-6000-direct", 2, (2, 24.0, "PHB"), "P2P"),
        ("8x-rtx-pro-6000-direct", 4, (2, 24.0, "PHB"), "SHM"),
        ("8x-rtx-pro-6000-direct", 8, (1, 0.1, "SYS"), "SHM"),
        ("8x-rtx-pro-6000-switches", 2, (2, 24.0, "PIX"), "P2P"),
        ("8x-rtx-pro-6000-switches", 4, (2, 20.0, "PHB"), "mixed"),
        ("8x-rtx-pro-6000-switches", 8, (1, 20.0, "SYS"), "mixed"),
    ],
)
def test_rings_of_pcie_hosts(
    machine: str, num_ranks: int, ring: tuple[int, float, str], transport: str
) -> None:
    host = load_machine(MACHINES / f"{machine}.yaml")
    comm = communicator_for(host, num_ranks, NcclSettings(), "2.28.9")
    assert (comm.ring.num_channels, comm.ring.bw_intra, comm.ring.type_intra) == ring
    assert comm.transport == transport
    assert comm.num_channels == 2 * ring[0]


def test_p2p_level_sys_moves_eight_gpus_from_host_memory_to_peer_access() -> None:
    host = load_machine(MACHINES / "8x-rtx-pro-6000-direct.yaml")
    settings = NcclSettings(p2p_level="SYS")
    assert communicator_for(host, 8, settings, "2.28.9").transport == "P2P"


def test_channel_settings_do_not_repeat_the_search() -> None:
    host = load_machine(MACHINES / "8x-rtx-pro-6000-switches.yaml")
    first = communicator_for(host, 8, NcclSettings(), "2.28.9")
    second = communicator_for(host, 8, NcclSettings(min_channels=16), "2.28.9")
    assert second.ring is first.ring
    assert (first.num_channels, second.num_channels) == (2, 16)


def test_intel_host_bridges_cost_a_fifth() -> None:
    # 48 GB/s carry 2 x 24 within an AMD socket, 2 x 20 = 40 within an Intel one
    values: dict[str, Any] = yaml.safe_load((MACHINES / "8x-rtx-pro-6000-direct.yaml").read_text())
    values["cpu"] |= {"vendor": "intel", "model": "Xeon", "generation": "SPR"}
    comm = communicator_for(Machine.from_dict(values), 4, NcclSettings(), "2.28.9")
    assert (comm.ring.num_channels, comm.ring.bw_intra) == (2, 20.0)


def test_nvls_needs_multicast_and_its_variable() -> None:
    host = load_machine(MACHINES / "2x-h200-nvlink.yaml")
    plain = communicator_for(host, 2, NcclSettings(), "2.28.9")
    sharp = communicator_for(host, 2, NcclSettings(), "2.28.9", multicast=True)
    off = communicator_for(host, 2, NcclSettings(nvls_enable=0), "2.28.9", multicast=True)
    older = communicator_for(host, 2, NcclSettings(), "2.27.7", multicast=True)
    assert (plain.nvls, off.nvls, older.nvls) == (None, None, None)
    assert sharp.nvls is not None
    assert (sharp.nvls.pattern, sharp.nvls.num_channels, sharp.nvls_channels) == (NVLS, 2, 16)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "settings", "message"),
    [
        ({}, 9, NcclSettings(), "has 8 GPUs, not 9"),
        ({}, 0, NcclSettings(), "has 8 GPUs, not 0"),
        ({"vendor": "intel", "generation": None}, 8, NcclSettings(), "cpu.generation None"),
        ({}, 8, NcclSettings(p2p_disable=True, shm_disable=True), "NCCL_SHM_DISABLE=1"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(
    changes: dict[str, Any], num_ranks: int, settings: NcclSettings, message: str
) -> None:
    values: dict[str, Any] = yaml.safe_load((MACHINES / "8x-rtx-pro-6000-direct.yaml").read_text())
    values["cpu"] |= changes
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        communicator_for(Machine.from_dict(values), num_ranks, settings, "2.28.9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [([], "no processor"), (["CPU/0-0 (1/2/0)"], "no GPU"), (["+ PCI[48.0] - GPU/0-60 (0)"], "no")],
)
def test_printed_topologies_without_devices_are_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topology_from_log(lines, 90, DEFAULT)


def test_dev_nodes_of_2_30_are_gpus() -> None:
    lines = [
        "CPU/0-0 (1/1/4)",
        "+ PCI[48.0] - DEV/0-60 (2335)",
        "              + LOC[5000.0] - GPU/0-60",
        "              + NVL[370.8] - NVS/0-0",
        "+ PCI[48.0] - DEV/0-70 (2335)",
        "              + NVL[370.8] - NVS/0-0",
    ]
    topo = topology_from_log(lines, 90, DEFAULT)
    ring, tree = search_all(topo, release_for("2.30.7"))
    assert [summary(ring), summary(tree)] == printed("nvlink_default")[1]


def random_topology(chance: random.Random) -> NcclTopology:
    """Sockets, switches and GPUs as they come."""
    vendor, generation = chance.choice([("amd", None), ("intel", "SPR"), ("intel", "EMR")])
    topo = NcclTopology(vendor, generation, chance.choice([80, 89, 90, 120]))
    for _ in range(chance.choice([1, 2])):
        cpu = topo.add("CPU")
        for _ in range(chance.choice([1, 2])):
            parent = cpu
            if chance.random() < 0.5:
                parent = topo.add("PCI")
                topo.connect(parent, cpu, "PCI", chance.choice([24.0, 48.0]))
            for _ in range(chance.choice([1, 2])):
                topo.connect(topo.add("GPU"), parent, "PCI", chance.choice([12.0, 24.0, 48.0]))
    if len(topo.gpus) < 2:
        topo.connect(topo.add("GPU"), topo.nodes["CPU"][0], "PCI", 24.0)
    return topo.finish(P2pRule(chance.choice([None, 0, 9])))


@pytest.mark.parametrize("seed", range(25))
def test_channels_fit_the_links_and_visit_every_gpu_once(seed: int) -> None:
    chance = random.Random(seed)
    topo = random_topology(chance)
    release = release_for(chance.choice(KNOWN_VERSIONS))
    ring = search(topo, release, RING, 1, 32)
    gpus = list(range(len(topo.gpus)))
    assert ring.num_channels == len(ring.orders) >= 1
    used: dict[int, float] = {}
    for order in ring.orders:
        assert sorted(order) == gpus
        for a, b in zip(order, order[1:] + order[:1], strict=True):
            for link in topo.path(a, b).links:
                used[id(link)] = used.get(id(link), 0.0) + ring.bw_intra
    if ring.bw_intra == 0.1:
        return
    rates = {
        id(link): link.bandwidth
        for nodes in topo.nodes.values()
        for node in nodes
        for link in node.links
    }
    assert all(load <= rates[link] + 1e-6 for link, load in used.items())


@pytest.mark.parametrize("seed", range(40))
def test_foresight_and_memory_change_no_graph(seed: int) -> None:
    chance = random.Random(1000 + seed)
    topo = random_topology(chance)
    release = release_for(chance.choice(KNOWN_VERSIONS))
    ring, tree = search_all(topo, release)
    plain_ring = PlainSearch(topo).run(release, RING, 1, 32)
    plain_tree = PlainSearch(topo).run(release, BALANCED_TREE, *[len(plain_ring.orders)] * 2)
    for found, plain in ((ring, plain_ring), (tree, plain_tree)):
        assert (found.pattern, found.orders) == (plain.pattern, tuple(plain.orders))
        assert (found.bw_intra, found.type_intra) == (plain.bandwidth, PATH_TYPES[plain.farthest])


@pytest.mark.parametrize("seed", range(20))
def test_an_attempt_seen_to_be_no_better_is_no_better_and_takes_its_steps(seed: int) -> None:
    chance = random.Random(seed)
    topo = random_topology(chance)
    layer, plain = ChannelLayer(Hops(topo)), PlainSearch(topo)
    best = Candidate(RING, 1, 32)
    for bandwidth in (3.0, 6.0, 12.0, 10.0, 20.0, 24.0, 9.0, 5.0):
        for same in (True, False):
            trial = Candidate(RING, 1, 32, bandwidth, bandwidth, type_intra=9, same_channels=same)
            before = (best.total, best.num_hops, list(best.orders))
            slow = Plan(RING, 1, 32, best.bw_intra, 9, same, best.num_hops, list(best.orders))
            foreseen = layer.foresee(trial, best)
            steps = plain.attempt(Plan(RING, 1, 32, bandwidth, 9, same), slow)
            if foreseen is None:
                assert layer.walk(trial, best) == steps
            else:
                left = foreseen.steps_left if isinstance(foreseen, Hopeless) else foreseen
                assert left == steps
                assert (best.total, best.num_hops, best.orders) == before
            assert (best.orders, best.num_hops) == (slow.orders, slow.hops)


@pytest.mark.parametrize(("machine", "most"), [("8x-rtx-pro-6000-switches", 4), ("8x-l40s", 4)])
def test_few_attempts_of_a_search_are_walked(machine: str, most: int) -> None:
    # 8 GPUs on switches or two sockets: NCCL makes 73 to 167 attempts
    topo = topology_of(load_machine(MACHINES / f"{machine}.yaml"), 8, DEFAULT)
    layer = ChannelLayer(Hops(topo))
    search_in = GraphSearch(layer, release_for("2.28.9").speeds(topo.min_cc), False)
    ring = search_in.run(RING, 1, 32)
    search_in.run(BALANCED_TREE, len(ring.orders), len(ring.orders))
    assert 0 < layer.num_walked <= most


def test_settings_and_releases_that_leave_the_paths_alike_share_one_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = load_machine(MACHINES / "8x-l40s.yaml")
    wide = communicator_for(host, 8, NcclSettings(p2p_level="SYS"), "2.28.9")
    _search.cache_clear()
    first = communicator_for(host, 8, NcclSettings(p2p_level="5"), "2.28.3")
    again = communicator_for(host, 8, NcclSettings(p2p_level="SYS"), "2.27.7")
    # 5 counts as SYS; the ring and the tree are searched once
    assert _search.cache_info().misses == 2
    assert first.ring is again.ring
    assert first.ring == wide.ring


def test_fewer_ranks_leave_unused_switches_and_sockets_out() -> None:
    host = load_machine(MACHINES / "8x-rtx-pro-6000-switches.yaml")
    topo = topology_of(host, 4, DEFAULT)
    assert {kind: len(nodes) for kind, nodes in topo.nodes.items()} == {
        "GPU": 4, "PCI": 2, "NVS": 0, "CPU": 1,
    }  # fmt: skip


def test_nominal_bandwidths() -> None:
    assert [pcie_gb_per_s(gen, 16) for gen in (3, 4, 5)] == [12.0, 24.0, 48.0]
    assert 18 * nvlink_gb_per_s(90) == pytest.approx(370.8)
    assert [socket_gb_per_s("amd", "Turin"), socket_gb_per_s("intel", "EMR")] == [16.0, 40.0]
    with pytest.raises(ValueError, match="PCIe generation 9"):
        pcie_gb_per_s(9, 16)
