"""What NCCL's own lines in a log say about the variables and the host."""

from collections.abc import Iterator

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.setup import Setup


def _parsed(setup: Setup):  # type: ignore[no-untyped-def]
    if setup.log is None or not setup.log.has_nccl:
        return None
    from autotune.nccl_log import parse_nccl_logs

    return parse_nccl_logs(setup.log.files)


@rule("nccl-not-effective", "issue C part 1: NCCL's log is the proof")
def variable_never_read(setup: Setup) -> Iterator[Hit]:
    """A variable asked for that NCCL's log says it did not read, or read otherwise."""
    log = _parsed(setup)
    asked = {n: v for n, v in setup.env.items() if n.startswith("NCCL_") and "DEBUG" not in n}
    if log is None or not asked:
        return
    from autotune.effect.judge import judge_log

    for verdict in judge_log(log, asked).knobs:
        if verdict.verdict == "not effective":
            yield error(
                f"{verdict.name}={verdict.asked}", verdict.reason,
                "`autotune env check` shows where it was lost",
            )  # fmt: skip


@rule(
    "nccl-graph-search", "local-inference-lab/rtx6kpro optimization/nccl-tuning; NVIDIA/nccl#2127"
)
def search_underestimates_the_host(setup: Setup) -> Iterator[Hit]:
    """A ring search that fell to SYS paths at 16 GB/s or below: NCCL's model of AMD sockets."""
    log = _parsed(setup)
    if log is None:
        return
    for process in log.processes:
        for comm in process.comms:
            ring = comm.graph(4)
            if ring is None or ring.type_intra != "SYS" or ring.bw_intra > 16.0:
                continue
            calls = 2 * setup.target.layers if setup.target is not None else 122
            yield warning(
                f"graph search ({ring.evidence})",
                f"nChannels {ring.num_channels}, {ring.bw_intra:g} GB/s, type {ring.type_intra}: "
                "NCCL counts every AMD socket link as 16 GB/s and picks few channels. With an "
                "explicit graph 32 KiB went from 48 to 26 us on dual Turin: up to about 22 us x "
                f"{calls} all-reduces = {22 * calls / 1e3:.1f} ms a step",
                "NCCL_GRAPH_FILE with an explicit graph for this board; channel counts alone are "
                "noise",
            )
            return


@rule("nccl-transport-shm", "noonghunna/club-3090#356")
def through_host_memory(setup: Setup) -> Iterator[Hit]:
    """GPUs that reach each other through host memory only."""
    log = _parsed(setup)
    if log is None:
        return
    for process in log.processes:
        for comm in process.comms:
            if comm.transport in ("SHM", "mixed"):
                first = next(t for t in comm.transports if t.via.startswith("SHM"))
                yield info(
                    f"transport {first.via} ({first.evidence})",
                    "no peer-to-peer between these GPUs (driver, PCIe path beyond NCCL_P2P_LEVEL, "
                    "or switched off): each hop crosses PCIe twice, about twice the latency of an "
                    "all-reduce by peer-to-peer",
                    "`autotune doctor` tells why; NCCL_P2P_LEVEL=SYS where the driver allows it "
                    "and IOMMU/ACS are off",
                )
                return


@rule("nccl-two-libraries", "servers.md A.4; vllm-project/vllm#15525")
def two_versions_in_one_run(setup: Setup) -> Iterator[Hit]:
    """Ranks or communicators of different NCCL versions."""
    log = _parsed(setup)
    if log is not None and len(log.versions) > 1:
        yield warning(
            f"NCCL {', '.join(log.versions)}",
            "more than one NCCL version in one run: a library path reached some communicators only",
            "compare the mapped libnccl of every worker",
        )
