"""The doctor's parsers on text of several tool versions."""

from pathlib import Path

import pytest

from autotune.doctor.kernel_line import parse_kernel_line
from autotune.doctor.lspci import LinkRate, full_address, parse_lspci
from autotune.doctor.smi import parse_smi
from autotune.doctor.system import parse_packages, parse_system
from autotune.doctor.topo import cpu_set, parse_topo

DATA = Path(__file__).parents[1] / "data" / "doctor"


def recorded(case: str, name: str) -> str:
    return (DATA / case / name).read_text()


def test_a_path_leads_from_the_gpu_through_the_switch_to_the_root_port() -> None:
    tree = parse_lspci(recorded("intel-switch-narrow-uplink", "lspci_vvnn.log"))
    gpu = tree.by_address["0000:1d:00.0"]
    path = tree.path(gpu)
    assert [device.port for device in path] == ["endpoint", "downstream", "upstream", "root"]
    # the switch's inside is no link: GPU - switch port, uplink - root port
    assert [(a.address, b.address) for a, b in tree.links(gpu)] == [
        ("0000:1d:00.0", "0000:17:02.0"),
        ("0000:16:00.0", "0000:15:01.0"),
    ]


@pytest.mark.parametrize(
    ("line", "rate"),
    [
        pytest.param("LnkSta: Speed 32GT/s (ok), Width x16 (ok)", LinkRate(5, 16), id="3.6"),
        pytest.param("LnkSta:\tSpeed 2.5GT/s (downgraded), Width x8", LinkRate(1, 8), id="3.9"),
        pytest.param("LnkSta: Speed 8GT/s, Width x4, TrErr- Train-", LinkRate(3, 4), id="3.5"),
        pytest.param("LnkSta: Speed 64GT/s, Width x16", LinkRate(6, 16), id="gen6"),
        pytest.param("LnkSta: Speed 2.5GT/s, Width x0", LinkRate(1, 0), id="down"),
        pytest.param("LnkSta: Speed unknown, Width x63 (overdriven)", None, id="unknown-speed"),
        pytest.param("LnkSta: Spe", None, id="cut"),
    ],
)
def test_reads_the_link_state_of_every_pciutils(line: str, rate: LinkRate | None) -> None:
    head = "41:00.0 3D controller: NVIDIA Corporation GB202GL (rev a1)\n"
    assert parse_lspci(f"{head}\t\t{line}\n").devices[0].current == rate


@pytest.mark.parametrize(
    ("head", "is_gpu"),
    [
        pytest.param("01:00.0 3D controller: NVIDIA Corporation X (rev a1)", True, id="plain"),
        pytest.param("10000:01:00.0 3D controller: NVIDIA Corporation X", True, id="domain"),
        pytest.param(
            "01:00.0 VGA compatible controller [0300]: NVIDIA Corporation X [10de:2204]",
            True,
            id="nn",
        ),
        pytest.param("01:00.0 3D controller [0302]: Device [10de:2bb5]", True, id="no-pci-ids"),
        pytest.param("01:00.1 Audio device: NVIDIA Corporation X", False, id="its-audio"),
        pytest.param("05:00.0 Bridge: NVIDIA Corporation GH100 [NVSwitch]", False, id="nvswitch"),
        pytest.param("0b:00.0 VGA compatible controller: ASPEED Technology", False, id="bmc"),
    ],
)
def test_knows_an_nvidia_gpu_from_the_rest(head: str, is_gpu: bool) -> None:
    (device,) = parse_lspci(head + "\n").devices
    assert device.is_nvidia_gpu is is_gpu


def test_buses_that_form_a_ring_end_the_path() -> None:
    text = (
        "01:00.0 PCI bridge: A\n\tBus: primary=02, secondary=02, subordinate=02\n"
        "02:00.0 PCI bridge: B\n\tBus: primary=01, secondary=01, subordinate=01\n"
    )
    tree = parse_lspci(text)
    assert len(tree.path(tree.devices[0])) == 2


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("c1:00.0", "0000:c1:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
    ],
)
def test_addresses_of_lspci_and_nvidia_smi_are_one(text: str, address: str) -> None:
    assert full_address(text) == address


@pytest.mark.parametrize(
    ("case", "name", "driver", "limit_w", "reasons"),
    [
        pytest.param(
            "amd-8gpu-faults", "nvidia-smi.xml", "580.95.05", 600.0, (), id="current-names"
        ),
        pytest.param(
            "consumer-2x-idle-old-driver",
            "nvidia-smi.xml",
            "470.256.02",
            350.0,
            ("gpu_idle",),
            id="throttle-reasons-and-power-readings",
        ),
    ],
)
def test_reads_the_names_of_old_and_new_drivers(
    case: str, name: str, driver: str, limit_w: float, reasons: tuple[str, ...]
) -> None:
    log = parse_smi(recorded(case, name))
    assert (log.driver, log.cut, log.attached) == (driver, False, len(log.gpus))
    assert (log.gpus[0].power_limit_w, log.gpus[0].reasons) == (limit_w, reasons)


def test_a_cut_xml_gives_the_whole_gpus_and_says_that_it_is_cut() -> None:
    text = recorded("amd-8gpu-faults", "nvidia-smi.xml")
    third = text.index("<gpu id", text.index("<gpu id", text.index("<gpu id") + 1) + 1)
    log = parse_smi(text[: third + 700])
    assert (len(log.gpus), log.attached, log.cut) == (2, 8, True)


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "No devices were found"])
def test_what_is_no_xml_is_refused_with_its_beginning(text: str) -> None:
    with pytest.raises(ValueError, match="no nvidia-smi XML; it begins with"):
        parse_smi(text)


@pytest.mark.parametrize(
    "value", ["N/A", "[N/A]", "[Not Supported]", "Requested functionality has been deprecated"]
)
def test_every_way_of_saying_no_value_is_none(value: str) -> None:
    xml = f"<nvidia_smi_log><gpu id='00000000:01:00.0'><persistence_mode>{value}</persistence_mode>"
    xml += f"<gpu_power_readings><current_power_limit>{value}</current_power_limit>"
    xml += "</gpu_power_readings></gpu></nvidia_smi_log>"
    (gpu,) = parse_smi(xml).gpus
    assert (gpu.persistence, gpu.power_limit_w, gpu.link) == (None, None, None)


def test_a_topology_with_colours_and_nics_gives_gpu_pairs_and_affinities() -> None:
    topo = parse_topo(recorded("h200-2x-nvlink-vm", "topo-m.txt"))
    assert list(topo.gpu_pairs()) == [(0, 1, "NV18")]
    assert topo.all_nvlink
    assert topo.cells["GPU0", "NIC0"] == "PHB"
    assert (topo.cpu_affinity[1], topo.numa_affinity[1]) == ("0-31", "0")


def test_a_topology_of_eight_gpus_keeps_its_sockets() -> None:
    topo = parse_topo(recorded("amd-8gpu-faults", "topo-m.txt"))
    pairs = {(a, b): cell for a, b, cell in topo.gpu_pairs()}
    assert len(pairs) == 28
    assert (pairs[0, 3], pairs[3, 4]) == ("NODE", "SYS")
    assert topo.numa_affinity[4] == "1"
    assert not topo.all_nvlink


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        pytest.param("ro quiet", None, id="default"),
        pytest.param("intel_iommu=on iommu=pt", "pt", id="pt"),
        pytest.param("iommu.passthrough=1", "pt", id="arm-pt"),
        pytest.param("intel_iommu=on,sm_on", "on", id="on-with-option"),
        pytest.param("amd_iommu=off iommu=pt", "off", id="off-wins"),
        pytest.param("amd_iommu=on", "on", id="amd-on"),
        pytest.param("quiet -- iommu=off", None, id="init-argument-is-not-ours"),
    ],
)
def test_reads_the_iommu_mode_off_the_kernel_line(line: str, mode: str | None) -> None:
    assert parse_kernel_line(line).iommu == mode


def test_addresses_with_colons_do_not_confuse_the_facts() -> None:
    facts = parse_system(
        "/sys/bus/pci/devices/0000:41:00.0/current_link_speed:2.5 GT/s PCIe\n"
        "/sys/bus/pci/devices/0000:41:00.0/current_link_width:8\n"
        "/sys/bus/pci/devices/0000:41:00.0/iommu_group/type:DMA-FQ\n"
        "not a fact\n"
        "/sys/devices/system/node/node1/cpulist:8-15\n"
    )
    device = facts.pci["0000:41:00.0"]
    assert (device.current, device.iommu_type) == (LinkRate(1, 8), "DMA-FQ")
    assert facts.nodes == {1: "8-15"}
    assert facts.hmm_disabled is None


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("torch==2.11.0+cu130\n", "13.0"),
        ("torch==2.13.0+cpu\n", "cpu"),
        ("torch==2.11.0\n", None),
        ("# torch-cuda==12.8\ntorch==2.11.0\n", "12.8"),
        ("Package Version\n------- -------\ntorch   2.9.1+cu128\n", "12.8"),
    ],
    ids=["local-version", "cpu", "not-told", "comment", "pip-list"],
)
def test_finds_the_cuda_of_torch(text: str, cuda: str | None) -> None:
    assert parse_packages(text).torch_cuda == cuda


def test_cpu_lists_expand() -> None:
    assert cpu_set("0-2,8\n") == {0, 1, 2, 8}


@pytest.mark.parametrize("identity", ["GPU-abc123", "", "0"])
def test_a_gpu_without_an_address_is_still_read(identity: str) -> None:
    name = "<product_name>X</product_name>"
    xml = f"<nvidia_smi_log><gpu id='{identity}'>{name}</gpu></nvidia_smi_log>"
    (gpu,) = parse_smi(xml).gpus
    assert gpu.name == "X"


@pytest.mark.parametrize("gen", ["0", "9", "N/A"])
def test_a_generation_that_does_not_exist_is_no_link(gen: str) -> None:
    xml = (
        "<nvidia_smi_log><gpu><pci><pci_gpu_link_info>"
        f"<pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>{gen}</current_link_gen></pcie_gen>"
        "<link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width>"
        "</link_widths></pci_gpu_link_info></pci></gpu></nvidia_smi_log>"
    )
    (gpu,) = parse_smi(xml).gpus
    assert (gpu.link, gpu.link_max) == (None, LinkRate(5, 16))


def test_a_matrix_pasted_with_indents_and_a_prompt_is_read() -> None:
    text = """2025/05/21 09:40:05 host nvidia-smi topo -m
        GPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity
    GPU0\tX\tNV12\tPXB\t48-63,176-191\t3
    GPU1\tNV12\tX\tPXB\t48-63,176-191\t3
    mlx5_0\tPXB\tPXB\tX
"""
    topo = parse_topo(text)
    assert list(topo.gpu_pairs()) == [(0, 1, "NV12")]
    assert topo.numa_affinity == {0: "3", 1: "3"}
