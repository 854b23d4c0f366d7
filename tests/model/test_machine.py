"""Machine files: loading, refusal of impossible hosts, path types, fingerprint."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.machine import Machine, load_machine

MACHINES = sorted((Path(__file__).parents[2] / "studies" / "machines").glob("*.yaml"))


def plain(name: str) -> dict[str, Any]:
    path = next(p for p in MACHINES if p.stem == name)
    values = yaml.safe_load(path.read_text())
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.stem)
def test_every_machine_file_loads_is_named_by_its_file_and_cites_every_value(path: Path) -> None:
    machine = load_machine(path)
    assert machine.name == path.stem
    assert all(machine.source_of(field) for field in machine.sourced_fields())
    assert Machine.from_dict(machine.to_dict()) == machine


def test_fingerprints_differ_between_hosts_and_ignore_rates_and_versions() -> None:
    prints = [load_machine(path).fingerprint for path in MACHINES]
    assert len(set(prints)) == len(prints) >= 6
    values = plain("8x-l40s")
    before = Machine.from_dict(values).fingerprint
    values["topology"]["links"][0]["gb_per_s"] = 20.0
    values["software"]["nccl_version"] = "2.30.7"
    values["name"] = "other"
    assert Machine.from_dict(values).fingerprint == before
    values["p2p"]["forced_through_host"] = True
    assert Machine.from_dict(values).fingerprint != before


@pytest.mark.parametrize(
    ("name", "a", "b", "expected"),
    [
        pytest.param("8x-rtx-pro-6000-switches", 0, 1, "PIX", id="one-switch"),
        pytest.param("8x-rtx-pro-6000-switches", 1, 2, "PHB", id="two-switches-one-socket"),
        pytest.param("8x-rtx-pro-6000-switches", 3, 4, "SYS", id="two-switches-two-sockets"),
        pytest.param("8x-rtx-pro-6000-direct", 0, 3, "PHB", id="root-ports-of-one-socket"),
        pytest.param("8x-rtx-pro-6000-direct", 3, 4, "SYS", id="two-sockets"),
        pytest.param("2x-h200-nvlink", 0, 1, "NVL", id="nvlink-switch"),
        pytest.param("8x-l40s", 5, 5, "LOC", id="itself"),
    ],
)
def test_path_types_are_nccls(name: str, a: int, b: int, expected: str) -> None:
    machine = Machine.from_dict(plain(name))
    assert machine.path_type(a, b) == machine.path_type(b, a) == expected


def test_two_chained_switches_are_pxb() -> None:
    values = plain("8x-rtx-pro-6000-switches")
    links = values["topology"]["links"]
    uplink = next(k for k in links if k["a"] == "switch1" and k["kind"] == "pcie")
    uplink["b"] = "switch0"
    assert Machine.from_dict(values).path_type(0, 3) == "PXB"


def test_a_host_without_gpus_is_a_machine() -> None:
    machine = Machine.from_dict(plain("cpu-2core"))
    assert machine.gpu is None
    assert machine.num_gpus == 0


def change(values: dict[str, Any], dotted: str, new: object) -> None:
    *parents, last = dotted.split(".")
    at: Any = values
    for key in parents:
        at = at[int(key)] if key.isdigit() else at[key]
    at[int(last) if last.isdigit() else last] = new


@pytest.mark.parametrize(
    ("dotted", "new", "words"),
    [
        pytest.param("topology.links.0.gb_per_s", 0, ["gb_per_s", "GB/s"], id="zero-bandwidth"),
        pytest.param("topology.links.0.gb_per_s", 48e9, ["gb_per_s", "10^9"], id="bytes-per-s"),
        pytest.param("topology.links.0.gb_per_s", 80, ["Gen5 x16", "GB/s"], id="above-signalling"),
        pytest.param("topology.links.0.gb_per_s", float("nan"), ["gb_per_s"], id="nan"),
        pytest.param("topology.links.0.latency_us", -1, ["latency_us", "micro"], id="negative"),
        pytest.param("topology.links.0.latency_us", 640, ["latency_us", "micro"], id="ns-as-us"),
        pytest.param("topology.links.0.kind", "pci", ["kind", "pcie"], id="unknown-link-kind"),
        pytest.param("topology.links.0.b", "switch9", ["switch9"], id="unknown-node"),
        pytest.param("topology.links.0.b", "memory0", ["gpu0", "host_memory"], id="wrong-ends"),
        pytest.param("topology.links.0.pcie_width", 12, ["12", "lanes"], id="width"),
        pytest.param("topology.links.0.pcie_gen", None, ["pcie_gen"], id="no-generation"),
        pytest.param("topology.nodes.1.id", "gpu0", ["gpu0", "twice"], id="same-id-twice"),
        pytest.param("gpu.memory_gib", -96, ["memory_gib", "GiB"], id="negative-memory"),
        pytest.param("gpu.dram_gb_per_s", 1.792e12, ["dram_gb_per_s", "GB/s"], id="dram-bytes"),
        pytest.param("gpu.l2_mib", 128 * 2**20, ["l2_mib", "MiB"], id="l2-in-bytes"),
        pytest.param("gpu.count", 4, ["gpu.count", "8"], id="count-differs"),
        pytest.param("gpu.compute_capability", "120", ["120", "12.0"], id="capability"),
        pytest.param("cpu.sockets", 1, ["cpu.sockets"], id="sockets-differ"),
        pytest.param("software.iommu", "yes", ["iommu"], id="unknown-iommu-mode"),
        pytest.param("sources.gpu", " ", ["gpu", "empty"], id="empty-source"),
        pytest.param("surprise", 1, ["surprise"], id="unknown-field"),
        pytest.param("measured", {"dram_gb_per_s": 0}, ["dram_gb_per_s", "GB/s"], id="measured-0"),
    ],
)
def test_impossible_hosts_and_unit_mistakes_are_refused_with_field_and_unit(
    dotted: str, new: object, words: list[str]
) -> None:
    values = plain("8x-rtx-pro-6000-switches")
    change(values, dotted, new)
    with pytest.raises(ValueError, match=r"^machine") as caught:
        Machine.from_dict(values)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_disconnected_gpu_is_refused() -> None:
    values = plain("8x-rtx-pro-6000-switches")
    del values["topology"]["links"][2]
    with pytest.raises(ValueError, match=r"gpu2.*disconnected"):
        Machine.from_dict(values)


@pytest.mark.parametrize("second_way", ["switch1", "root1"])
def test_a_cycle_of_pcie_links_is_refused(second_way: str) -> None:
    values = plain("8x-rtx-pro-6000-switches")
    link = copy.deepcopy(values["topology"]["links"][0])
    link["b"] = second_way
    values["topology"]["links"].append(link)
    with pytest.raises(ValueError, match="PCIe is a tree"):
        Machine.from_dict(values)


def test_a_value_without_a_source_is_refused() -> None:
    values = plain("8x-l40s")
    del values["sources"]["topology.links.socket"]
    with pytest.raises(ValueError, match=r"topology\.links\.socket has no source"):
        Machine.from_dict(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("- a\n- b\n", "mapping", id="a-list"),
        pytest.param("a: [1\n", "no YAML", id="broken"),
        pytest.param(None, "No such file", id="missing"),
    ],
)
def test_an_unreadable_file_is_one_line_naming_it(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "m.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        load_machine(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
