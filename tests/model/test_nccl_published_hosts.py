"""Graphs, tables and choices that others published from NCCL's logs on their hosts.

Sources: nccl-tests issue 307 (8 x RTX 4090), NVIDIA/nccl issue 1358 (2 GPUs on two NUMA nodes),
public write-ups of NCCL 2.30 on 8 x H100 and 8 x H200, on 2 x A100 behind NVSwitches and on
2 x RTX 4090. Only figures are taken; the topologies are rebuilt here.
"""

import pytest

from model.nccl.communicator import communicator_on, searched_graphs
from model.nccl.selector import Selector
from model.nccl.settings import NcclSettings
from model.nccl.topology import NcclTopology, P2pRule
from model.nccl.tuning import Graph
from model.nccl.versions import release_for

KIB, MIB = 1 << 10, 1 << 20
DEFAULT = P2pRule(level=None)
NO_PEER_ACCESS = P2pRule(level=None, possible=False)


def switched_4090() -> NcclTopology:
    """Four RTX 4090 per Gen4 switch, one switch per Skylake-class socket."""
    topo = NcclTopology("intel", "SKL", 89)
    for _ in range(2):
        cpu = topo.add("CPU")
        switch = topo.add("PCI")
        topo.connect(switch, cpu, "PCI", 24.0)
        for _ in range(4):
            topo.connect(topo.add("GPU"), switch, "PCI", 24.0)
    return topo.finish(NO_PEER_ACCESS)


def two_gpus(capability: int, *, pcie: float, num_cpus: int, nvlink: float = 0.0) -> NcclTopology:
    """Two GPUs on one or two Intel NUMA nodes, with an NVLink switch if ``nvlink`` (GB/s)."""
    topo = NcclTopology("intel", "SKL", capability)
    cpus = [topo.add("CPU") for _ in range(num_cpus)]
    for index in range(2):
        topo.connect(topo.add("GPU"), cpus[index % num_cpus], "PCI", pcie)
    if nvlink:
        switch = topo.add("NVS")
        for gpu in topo.gpus:
            topo.connect(gpu, switch, "NVL", nvlink)
    return topo.finish(DEFAULT if nvlink else NO_PEER_ACCESS)


def hgx_hopper() -> NcclTopology:
    """Eight H100 or H200 on NVSwitches, four per socket behind PCIe switches."""
    topo = NcclTopology("intel", "SPR", 90)
    switch = topo.add("NVS")
    for _ in range(2):
        cpu = topo.add("CPU")
        for _ in range(4):
            bridge = topo.add("PCI")
            topo.connect(bridge, cpu, "PCI", 48.0)
            gpu = topo.add("GPU")
            topo.connect(gpu, bridge, "PCI", 48.0)
            topo.connect(gpu, switch, "NVL", 370.8)
    return topo.finish(DEFAULT)


def summary(graph: Graph) -> tuple[int, int, float, str, bool]:
    return (
        graph.pattern, graph.num_channels, graph.bw_intra, graph.type_intra, graph.same_channels,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("topo", "rule", "ring", "tree"),
    [
        pytest.param(
            switched_4090(), NO_PEER_ACCESS, (4, 1, 5.0, "SYS", True), (1, 1, 5.0, "SYS", True),
            id="8x4090-two-switches",
        ),
        pytest.param(
            two_gpus(80, pcie=24.0, num_cpus=2), NO_PEER_ACCESS,
            (4, 1, 10.0, "SYS", True), (1, 1, 10.0, "SYS", True), id="2-gpus-across-numa-nodes",
        ),
        pytest.param(
            two_gpus(89, pcie=24.0, num_cpus=1), NO_PEER_ACCESS,
            (4, 1, 20.0, "PHB", True), None, id="2x4090-host-bridge",
        ),
        pytest.param(
            two_gpus(80, pcie=24.0, num_cpus=2, nvlink=240.0), DEFAULT,
            (4, 12, 20.0, "NVL", True), None, id="2xA100-nvswitch",
        ),
    ],
)  # fmt: skip
def test_search_gives_the_published_graphs(
    topo: NcclTopology,
    rule: P2pRule,
    ring: tuple[int, int, float, str, bool],
    tree: tuple[int, int, float, str, bool] | None,
) -> None:
    found = searched_graphs(topo, release_for("2.28.9"), rule, multicast=False)
    assert summary(found.ring) == ring
    if tree is not None:
        assert summary(found.tree) == tree


@pytest.fixture(scope="module")
def hopper() -> Selector:
    release = release_for("2.30.4")
    graphs = searched_graphs(hgx_hopper(), release, DEFAULT, multicast=True)
    return Selector(communicator_on(graphs, NcclSettings(), release))


@pytest.mark.parametrize(
    ("algo", "proto", "cell"),
    [
        ("tree", "LL", "15.2/43.6"), ("tree", "LL128", "31.5/128.8"),
        ("tree", "Simple", "64.4/165.6"), ("ring", "LL", "15.0/80.6"),
        ("ring", "LL128", "40.6/189.3"), ("ring", "Simple", "56.0/205.7"),
        ("nvls", "Simple", "25.0/272.0"),
    ],
)  # fmt: skip
def test_eight_h200_have_the_published_table(
    hopper: Selector, algo: str, proto: str, cell: str
) -> None:
    entry = hopper.table[algo, proto]
    assert f"{entry.latency_us:.1f}/{entry.bandwidth:.1f}" == cell


@pytest.mark.parametrize(
    ("size", "algo", "proto", "channels"),
    [
        (4096, "ring", "LL", 1), (32 * KIB, "ring", "LL", 1), (MIB, "ring", "LL", 24),
        (2 * MIB, "nvls", "Simple", 16), (1 << 30, "nvls", "Simple", 16),
    ],
)  # fmt: skip
def test_eight_hopper_gpus_choose_as_published(
    hopper: Selector, size: int, algo: str, proto: str, channels: int
) -> None:
    choice = hopper.choose(size)
    assert (choice.algo, choice.proto, choice.channels) == (algo, proto, channels)


def test_without_nvls_large_messages_fall_back_to_ring_ll128() -> None:
    release = release_for("2.30.4")
    graphs = searched_graphs(hgx_hopper(), release, DEFAULT, multicast=True)
    selector = Selector(communicator_on(graphs, NcclSettings(nvls_enable=0), release))
    choice = selector.choose(32 * MIB)
    assert (choice.algo, choice.proto) == ("ring", "LL128")
