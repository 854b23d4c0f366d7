"""The probe: distributions, the topology out of /sys, the machine file, the command."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from autotune.cli.main import main
from autotune.doctor.facts import parse
from autotune.doctor.lspci import LinkRate
from autotune.doctor.sources import read_folder
from autotune.doctor.topo import parse_topo
from autotune.errors import AutotuneError
from autotune.probe.build import build_machine
from autotune.probe.host_graph import GpuPlace, gpu_topology, place_of, sockets_of_nodes
from autotune.probe.spread import Sample, find_modes
from autotune.probe.timings import Allreduce, ProbeError, Timings, allreduce, run_worker, take
from model.machine import Machine, load_machine
from model.topology import Topology

no_gpu = pytest.mark.skipif(
    os.path.exists("/proc/driver/nvidia/gpus"), reason="this host has a GPU"
)
DATA = Path(__file__).parents[1] / "data" / "doctor"


def normal(centre: float, sd: float, n: int, seed: int = 0) -> list[float]:
    return list(np.random.default_rng(seed).normal(centre, sd, n))


@pytest.mark.parametrize(
    ("values", "bimodal"),
    [
        pytest.param(normal(10, 0.3, 200), False, id="one-mode"),
        pytest.param(normal(10, 0.3, 120) + normal(16, 0.4, 80, 1), True, id="two-modes"),
        pytest.param(normal(10, 0.3, 195) + [90.0] * 5, False, id="outliers-are-no-mode"),
        pytest.param(
            list(10 + np.random.default_rng(2).exponential(3, 300)), False, id="long-tail"
        ),
        pytest.param(normal(10, 0.05, 100) + normal(10.4, 0.05, 100, 1), False, id="4-percent"),
        pytest.param(list(np.linspace(5, 50, 100)), False, id="uniform"),
        pytest.param([7.0] * 50, False, id="constant"),
        pytest.param([1.0, 2.0], False, id="too-few"),
    ],
)
def test_two_modes_are_said_only_where_there_are_two(values: list[float], bimodal: bool) -> None:
    modes = find_modes(values)
    assert (modes is not None) is bimodal


def test_the_modes_carry_their_centres_and_the_share_of_the_slow_one() -> None:
    modes = find_modes(normal(10, 0.2, 150) + normal(16, 0.2, 50, 1))
    assert modes is not None
    assert modes.fast == pytest.approx(10, rel=0.02)
    assert modes.slow == pytest.approx(16, rel=0.02)
    assert modes.slow_share == pytest.approx(0.25)


def test_a_sample_keeps_order_statistics() -> None:
    sample = Sample.of(list(range(1, 101)))
    assert (sample.median, sample.n) == (50.5, 100)
    assert sample.p05 < sample.median < sample.p95
    assert sample.spread().n == 100


def test_no_timings_are_refused() -> None:
    with pytest.raises(ValueError, match="no timings"):
        Sample.of([])


def fake_sys(root: Path, chains: list[list[str]], speeds: dict[str, tuple[str, int]]) -> Path:
    """A /sys/bus/pci/devices whose links lead into a tree of bridges."""
    devices = root / "bus"
    devices.mkdir()
    for chain in chains:
        place = root / "devices" / f"pci{chain[0][:7]}"
        for address in chain:
            place = place / address
            place.mkdir(parents=True, exist_ok=True)
            speed, width = speeds.get(address, ("32.0 GT/s PCIe", 16))
            (place / "max_link_speed").write_text("32.0 GT/s PCIe\n")
            (place / "max_link_width").write_text("16\n")
            (place / "current_link_speed").write_text(speed + "\n")
            (place / "current_link_width").write_text(f"{width}\n")
            (place / "numa_node").write_text("1\n" if address.startswith("0000:8") else "0\n")
            link = devices / address
            if not link.exists():
                link.symlink_to(place)
    return devices


SWITCHED = [
    ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0", "0000:1b:00.0"],
    ["0000:15:01.0", "0000:16:00.0", "0000:17:01.0", "0000:1c:00.0"],
    ["0000:80:01.0", "0000:81:00.0"],
]


def test_places_are_read_from_the_tree_of_bridges(tmp_path: Path) -> None:
    devices = fake_sys(tmp_path, SWITCHED, {"0000:16:00.0": ("16.0 GT/s PCIe", 8)})
    place = place_of("0000:1b:00.0", devices)
    assert place.ports == ("0000:15:01.0", "0000:16:00.0", "0000:17:00.0")
    assert place.uplinks == {"0000:16:00.0": LinkRate(4, 8)}
    assert (place.numa_node, place.link) == (0, LinkRate(5, 16))


def test_an_idle_generation_is_ignored_and_a_narrow_width_is_kept(tmp_path: Path) -> None:
    devices = fake_sys(tmp_path, SWITCHED, {"0000:81:00.0": ("2.5 GT/s PCIe", 8)})
    assert place_of("0000:81:00.0", devices).link == LinkRate(5, 8)


def test_a_gpu_that_sys_does_not_show_is_an_error(tmp_path: Path) -> None:
    devices = fake_sys(tmp_path, SWITCHED, {})
    with pytest.raises(ValueError, match=r"0000:99:00\.0 is not there"):
        place_of("0000:99:00.0", devices)


def topology_of(places: list[GpuPlace], **changes: Any) -> Topology:
    arguments: dict[str, Any] = {
        "socket_of_node": {0: 0, 1: 1},
        "num_sockets": 2,
        "memory_gb_per_s": 300.0,
        "topo": None,
        "cc": 120,
    }
    return Topology.model_validate(gpu_topology(places, **(arguments | changes)))


def test_gpus_below_one_switch_share_its_uplink(tmp_path: Path) -> None:
    devices = fake_sys(tmp_path, SWITCHED, {"0000:16:00.0": ("16.0 GT/s PCIe", 8)})
    topology = topology_of([place_of(chain[-1], devices) for chain in SWITCHED])
    kinds = list(topology.kinds.values())
    assert (kinds.count("switch"), kinds.count("root_port"), kinds.count("gpu")) == (1, 2, 3)
    assert (topology.path_type(0, 1), topology.path_type(0, 2)) == ("PIX", "SYS")
    (uplink,) = [link for link in topology.links if {link.a, link.b} == {"switch0", "root0"}]
    assert (uplink.pcie_gen, uplink.pcie_width) == (4, 8)


def test_a_virtual_machine_without_bridges_gives_each_gpu_a_root_port() -> None:
    place = GpuPlace((), -1, LinkRate(5, 16), copy_gb_per_s=52.0)
    topo = parse_topo((DATA / "h200-2x-nvlink-vm" / "topo-m.txt").read_text())
    topology = topology_of([place, place], topo=topo, cc=90, num_sockets=1, socket_of_node={0: 0})
    assert topology.path_type(0, 1) == "NVL"
    nvlink = [link for link in topology.links if link.kind == "nvlink"]
    # NCCL counts NV18 of an H200 as 370.8 GB/s
    assert {link.gb_per_s for link in nvlink} == {370.8}
    assert {link.gb_per_s for link in topology.links if link.kind == "pcie"} == {52.0}


def test_hidden_gpus_keep_the_nvlinks_of_the_others_right() -> None:
    place = GpuPlace((), 0, LinkRate(4, 16))
    topo = parse_topo(
        "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\n"
        "GPU0\tX\tNV4\tSYS\tSYS\t0-7\nGPU1\tNV4\tX\tSYS\tSYS\t0-7\n"
        "GPU2\tSYS\tSYS\tX\tNV4\t0-7\nGPU3\tSYS\tSYS\tNV4\tX\t0-7\n"
    )
    topology = topology_of([place] * 3, topo=topo, cc=80, numbers=[1, 2, 3])
    nvlink = [(link.a, link.b) for link in topology.links if link.kind == "nvlink"]
    assert nvlink == [("gpu1", "gpu2")]


def test_a_measured_rate_above_the_signalling_rate_is_cut_to_it() -> None:
    place = GpuPlace(("0000:00:01.0",), 0, LinkRate(3, 8), copy_gb_per_s=25.0)
    (link,) = [link for link in topology_of([place]).links if link.kind == "pcie"]
    assert link.gb_per_s == pytest.approx(7.88)


def test_several_nodes_of_one_socket_are_one_socket(tmp_path: Path) -> None:
    for node, (cpus, package) in enumerate((("0-3", 0), ("4-7", 0), ("8-15", 1))):
        folder = tmp_path / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
        cpu = tmp_path / "cpu" / f"cpu{cpus.split('-')[0]}" / "topology"
        cpu.mkdir(parents=True)
        (cpu / "physical_package_id").write_text(f"{package}\n")
    assert sockets_of_nodes(tmp_path / "node", tmp_path / "cpu") == {0: 0, 1: 0, 2: 1}


def cpu_timings() -> Timings:
    def row(size: int, values: list[float]) -> Allreduce:
        return Allreduce(
            backend="gloo", num_ranks=2, size_bytes=size, time=Sample.of(values), env={}
        )

    return Timings(
        host_read=Sample.of([9.0, 10.0, 11.0]),
        launch_eager=Sample.of(normal(3, 0.05, 150) + normal(6, 0.05, 50, 1)),
        allreduce=[row(1024, [100.0, 110.0, 130.0]), row(65536, [200.0, 210.0, 290.0])],
        skipped={"all-reduce one_shot x 2": "hang: no sign of life"},
    )


def test_the_machine_says_where_each_measured_value_is_from() -> None:
    machine = build_machine(cpu_timings(), "cpu", "test-host")
    assert machine.measured.dram_gb_per_s == 10.0
    assert [row.time_us for row in machine.measured.allreduce] == [110.0, 210.0]
    launch = machine.source_of("measured.launch_eager")
    assert launch is not None
    assert "n 200" in launch
    assert "bimodal" in launch
    assert "65536 bytes" in str(machine.source_of("measured.allreduce"))
    assert "hang" in machine.sources["skipped.all-reduce one_shot x 2"]


def gpu_timings(**changes: Any) -> Timings:
    def row(address: str) -> dict[str, Any]:
        values = {
            "name": "NVIDIA H200",
            "capability": "9.0",
            "num_sms": 132,
            "memory_bytes": 150_000_000_000,
            "l2_bytes": 50 * 2**20,
            "smem_bytes": 227 * 1024,
            "memory_clock_khz": 3_201_000,
            "memory_bus_bits": 6144,
            "address": address,
            "to_gpu": [54.0, 55.0, 55.5],
            "to_host": [52.0, 52.5, 51.0],
            "dram": [4100.0, 4200.0, 4150.0],
            "bf16_tflops": [700.0, 750.0, 740.0],
        }
        return values | changes

    return Timings(
        host_read=Sample.of([200.0]),
        launch_eager=Sample.of([5.0, 6.0]),
        launch_graph=Sample.of([1.5, 1.6]),
        gpus=[row("0000:05:00.0"), row("0000:06:00.0")],
        peers=[(0, 1, True), (1, 0, True)],
        nccl_version="2.28.9",
    )


H200 = [["0000:00:03.0", "0000:05:00.0"], ["0000:00:04.0", "0000:06:00.0"]]


def test_a_gpu_machine_is_built_from_rates_sys_and_the_doctors_facts(tmp_path: Path) -> None:
    machine = build_machine(
        gpu_timings(),
        "cuda",
        facts=parse(read_folder(DATA / "h200-2x-nvlink-vm")),
        devices=fake_sys(tmp_path, H200, {}),
    )
    assert machine.gpu is not None
    # 2 transfers x 3.201 GHz x 6144 bit
    assert machine.gpu.dram_gb_per_s == pytest.approx(4916.7, abs=0.1)
    assert machine.gpu.bf16_tflops == 750.0
    assert machine.measured.dram_gb_per_s == 4150.0
    assert machine.path_type(0, 1) == "NVL"
    assert machine.p2p.possible
    assert (machine.software.driver, machine.software.iommu) == ("580.95.05", "off")
    pcie = [link for link in machine.topology.links if link.kind == "pcie"]
    # the slower direction's median
    assert [link.gb_per_s for link in pcie] == [52.0, 52.0]
    assert Machine.from_dict(machine.to_dict()) == machine


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"address": "0000:99:00.0"}, "GPU 0: .*0000:99:00.0 is not there", id="lost"),
        pytest.param({"name": None}, "NVIDIA A100", id="unequal"),
    ],
)
def test_gpus_that_no_machine_file_can_hold_are_one_clear_line(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    timings = gpu_timings(**{k: v for k, v in changes.items() if v})
    if "name" in changes:
        timings.gpus[1]["name"] = "NVIDIA A100"
    facts = parse(read_folder(DATA / "h200-2x-nvlink-vm"))
    with pytest.raises(AutotuneError, match=words):
        build_machine(timings, "cuda", facts=facts, devices=fake_sys(tmp_path, H200, {}))


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.probe.timings.host_read", lambda *_, **__: Sample.of([5.0]))
    monkeypatch.setattr("autotune.probe.timings._WORKER_TIMEOUT_S", 0.001)
    heard: list[str] = []
    timings = take("cpu", 0, heard.append, quick=True)
    assert heard == ["memory", "launches"]
    assert timings.host_read is not None
    assert "hangs" in timings.skipped["launches"]


def test_a_worker_that_fails_gives_its_last_line() -> None:
    with pytest.raises(ProbeError, match="no-such-task"):
        run_worker("no-such-task")


def test_all_reduces_run_on_real_ranks_and_grow_with_the_size() -> None:
    rows, version = allreduce("cpu", 2, "gloo", sizes_bytes=(1024, 4 * 2**20), repeats=15)
    assert version is None
    small, large = rows
    assert (small.size_bytes, small.num_ranks, small.time.n) == (1024, 2, 15)
    # the fast end: neighbours of a shared host slow both, now and then
    assert large.time.p05 > small.time.p05


@no_gpu
def test_an_all_reduce_that_can_not_start_says_why() -> None:
    with pytest.raises(ProbeError, match="cuda"):
        allreduce("cuda", 2, "nccl", sizes_bytes=(1024,), repeats=1)


def test_a_quick_probe_writes_a_machine_file_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--quick", "--device", "cpu", "--json", "-o", str(path)])
    assert ended.value.code == 0
    answer = json.loads(capsys.readouterr().out)
    machine = load_machine(path)
    assert machine.fingerprint == answer["fingerprint"]
    assert machine.measured.launch_eager is not None
    assert 0.05 < machine.measured.launch_eager.median_us < 1000
    assert machine.measured.dram_gb_per_s is not None
    assert yaml.safe_load(path.read_text())["gpu"] is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda p: p.write_text("mine"), "exists already", id="would-overwrite"),
        pytest.param(lambda p: p.mkdir(), "is a folder", id="folder"),
        pytest.param(lambda p: p.parent.rmdir(), "no folder", id="no-folder"),
    ],
)
def test_a_file_that_can_not_be_written_is_refused_before_measuring(
    make: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "place" / "machine.yaml"
    path.parent.mkdir()
    make(path)
    with pytest.raises(SystemExit) as ended:
        main(["probe", "-o", str(path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert str(path.parent) in line


@no_gpu
def test_gpus_that_are_not_there_are_a_user_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--device", "cuda"])
    assert ended.value.code == 2
    assert "torch sees no GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_host_is_described_with_its_links_and_rates(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["probe", "--device", "cuda", "-o", str(path)])
    assert ended.value.code == 0
    machine = load_machine(path)
    assert machine.gpu is not None
    assert machine.num_gpus == machine.gpu.count
    eager, graph = machine.measured.launch_eager, machine.measured.launch_graph
    assert eager is not None
    assert graph is not None
    assert graph.median_us < eager.median_us
    assert (machine.measured.dram_gb_per_s or 0) < 1.02 * machine.gpu.dram_gb_per_s
    assert bool(machine.measured.allreduce) == (machine.num_gpus > 1)
