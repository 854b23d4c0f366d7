"""Settings that this host decides: peer-to-peer, custom all-reduce, fusions, number of ranks."""

from collections.abc import Iterator

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.nccl_effects import forward_cost
from autotune.lint.setup import Setup
from model.nccl.settings import NcclSettings, c_integer

_P2P_REPORTS = "local-inference-lab/rtx6kpro#15, vllm-project/vllm#33041"


def _p2p_reach(setup: Setup) -> str | None:
    """Farthest path on which NCCL will use peer-to-peer under these variables; None: off."""
    if c_integer(setup.env.get("NCCL_P2P_DISABLE", "0")) == 1:
        return None
    try:
        rank = NcclSettings(p2p_level=setup.env.get("NCCL_P2P_LEVEL")).p2p_rank()
    except ValueError:
        rank = None
    from model.nccl.paths import PATH_RANK, PATH_TYPES

    if rank is not None:
        return PATH_TYPES[rank] if rank > PATH_RANK["LOC"] else None
    machine = setup.machine
    amd_pair = machine is not None and machine.cpu.vendor == "amd" and (setup.tp or 0) == 2
    return "SYS" if amd_pair else "PXB"


@rule("p2p-unsafe", _P2P_REPORTS)
def peer_traffic_under_iommu(setup: Setup) -> Iterator[Hit]:
    """NCCL over PCIe peer-to-peer while the IOMMU translates or ACS redirects: it hangs."""
    reach = _p2p_reach(setup)
    if reach is None or reach == "NVL" or setup.nvlink or setup.tp == 1:
        return
    from model.nccl.paths import PATH_RANK

    asked = setup.env.get("NCCL_P2P_LEVEL")
    subject = f"NCCL_P2P_LEVEL={asked}" if asked else "NCCL peer-to-peer"
    if setup.machine is None:
        if asked is not None and PATH_RANK[reach] > PATH_RANK["PXB"]:
            yield warning(
                subject,
                "peer-to-peer across host bridges: first traffic can hang (100 % utilisation at "
                "low power) where the IOMMU translates or ACS redirects; \"Init COMPLETE\" does "
                "not prove that it works",
                "run `autotune doctor` for IOMMU and ACS, and one all-reduce with a time-out first",
            )  # fmt: skip
        return
    cause = setup.translated
    used = [
        path for path in setup.path_types if PATH_RANK["NVL"] < PATH_RANK[path] <= PATH_RANK[reach]
    ]
    if used and cause is not None and setup.machine.p2p.possible:
        yield error(
            subject,
            f"NCCL will use peer-to-peer over {'/'.join(sorted(used))} paths of "
            f"{setup.machine.name} while {cause}: hangs or corrupt data",
            "boot with iommu=pt (or off) and disable ACS redirect; until then NCCL_P2P_DISABLE=1",
        )


@rule(
    "custom-allreduce-two-ranks",
    "vllm-project/vllm#51513, local-inference-lab/rtx6kpro#21",
    "sglang",
    "vllm",
)
def two_ranks_take_another_path(setup: Setup) -> Iterator[Hit]:
    """Two PCIe ranks, no more, pass the servers' gate: their custom all-reduce (by peers) runs.

    NCCL_P2P_DISABLE binds NCCL only.
    """
    if setup.tp != 2 or setup.command.has("--disable-custom-all-reduce") or setup.nvlink:
        return
    cause = setup.translated
    if cause is not None:
        yield error(
            "custom all-reduce at 2 ranks",
            "with 2 ranks the server's own all-reduce is on and reads the peer's memory over PCIe "
            f"while {cause}: the first one may never end (100 % utilisation at idle power)",
            "--disable-custom-all-reduce, or iommu=pt and ACS off",
        )
    elif c_integer(setup.env.get("NCCL_P2P_DISABLE", "0")) == 1:
        yield warning(
            "NCCL_P2P_DISABLE=1",
            "it binds NCCL only: with 2 ranks the server's custom all-reduce still goes "
            "peer-to-peer",
            "add --disable-custom-all-reduce where peer-to-peer must stay off",
        )
    elif setup.machine is not None:
        yield info(
            "custom all-reduce at 2 ranks",
            "2 ranks take the custom all-reduce, more take NCCL: a result (or a hang) of one world "
            "size says nothing about the other",
            "test each world size by itself",
        )


@rule("custom-allreduce-refused", "vllm-project/vllm#56128, servers.md A.4", "sglang", "vllm")
def custom_refused(setup: Setup) -> Iterator[Hit]:
    """More than two GPUs without full NVLink: refused at start and again at each call."""
    if setup.nvlink is not False or (setup.tp or 0) <= 2:
        return
    option = setup.command.option("--disable-custom-all-reduce")
    if option is not None:
        yield info(
            option.text,
            f"inert: {setup.tp} GPUs without full NVLink are refused anyway (at start, and by a "
            "second gate at each call); it only silences the warning",
            "",
        )


@rule(
    "allreduce-pcie-ipc",
    "sgl-project/sglang#34528, #32479; vllm-project/vllm#50941",
    "sglang",
    "vllm",
)
def pcie_allreduce(setup: Setup) -> Iterator[Hit]:
    """The opt-in PCIe all-reduce: off where it would pay, on where it cannot run."""
    name = {
        "sglang": "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE",
        "vllm": "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
    }[setup.engine]
    first = {"sglang": "0.5.23", "vllm": "0.33"}[setup.engine]
    lacking = {"sglang": "0.5.20", "vllm": "0.17"}[setup.engine]
    on = setup.env.get(name, "0").lower() in ("1", "true")
    tp = setup.tp or 0
    if on:
        problems = []
        if setup.before(lacking):
            problems.append(f"this version does not have it (read in {first})")
        if tp not in (2, 4, 8) and setup.tp is not None:
            problems.append(f"it serves 2, 4 or 8 ranks, not {tp}")
        if setup.command.has("--enable-deterministic-inference"):
            problems.append("deterministic inference turns it off")
        if setup.command.text("--dtype") in ("float16", "half", "float32", "float"):
            problems.append(f"it serves bf16 only, not {setup.command.text('--dtype')}")
        if problems:
            yield error(f"{name}=1", "inert: " + "; ".join(problems), "drop it")
        if setup.nvlink:
            yield info(
                f"{name}=1", "the GPUs are joined by NVLink: the NVLink all-reduce is faster", ""
            )
    elif setup.nvlink is False and tp in (4, 8) and not setup.before(lacking):
        yield info(
            name,
            f"{tp} GPUs without NVLink: the custom all-reduce refuses them and every reduction "
            f"goes through NCCL{forward_cost(setup)}. The opt-in PCIe all-reduce was measured at "
            "5.3 us against 205 us for 12 KiB on one 8-GPU host",
            f"try {name}=1 with a decode-sized workspace, and compare",
        )


_FUSIONS = {
    "--enable-symm-mem": "symmetric memory needs NVLink multicast",
    "--enable-nccl-nvls": "NVLS needs NVLink multicast",
    "--enable-torch-symm-mem": "torch symmetric memory all-reduce runs on sm_90 and sm_100 only",
    "--enable-flashinfer-allreduce-fusion":
        "the FlashInfer all-reduce fusion is not built for sm_120 and needs NVLink",
    "--enable-mscclpp": "the mscclpp all-reduce needs NVLink",
}  # fmt: skip
_FUSION_VARIABLES = {
    "VLLM_USE_NCCL_SYMM_MEM": "NCCL symmetric memory is restricted to NVLink systems (2.29.2)",
    "NCCL_NVLS_ENABLE": "NVLS needs an NVLink switch",
}


@rule("fusion-unavailable", "servers.md A.4; nccl-pcie.md 4 (no fusion, no symm-mem on sm_120)")
def feature_of_another_gpu(setup: Setup) -> Iterator[Hit]:
    """Fusions and symmetric memory asked for where the hardware has none."""
    if setup.nvlink is not False:
        return
    host = setup.machine.name if setup.machine else ""
    for name, why in _FUSIONS.items():
        option = setup.command.option(name)
        if option is not None and setup.command.has(name):
            yield warning(
                option.text, f"inert on {host} (no NVLink between these GPUs): {why}", "drop it"
            )
    for name, why in _FUSION_VARIABLES.items():
        if c_integer(setup.env.get(name, "0")) == 1:
            yield warning(
                f"{name}=1", f"inert on {host} (no NVLink between these GPUs): {why}", "drop it"
            )


@rule("rank-count", "a machine file's gpu.count")
def more_ranks_than_gpus(setup: Setup) -> Iterator[Hit]:
    """Tensor parallelism beyond the host's GPUs, or a shape that does not divide."""
    machine, tp = setup.machine, setup.tp
    if (
        machine is not None
        and machine.gpu is not None
        and tp is not None
        and tp > machine.gpu.count
    ):
        yield error(
            f"tensor parallel {tp}", f"{machine.name} has {machine.gpu.count} GPUs", "lower it"
        )
    if setup.target is not None and tp is not None:
        problem = setup.target.head_problem(tp)
        if problem is not None:
            yield error(f"tensor parallel {tp}", problem, "choose a divisor of the heads")
