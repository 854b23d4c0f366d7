"""NCCL logs for tests: line forms of releases (from its sources), and what collectors add."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "data" / "nccl_logs"
#: a wrapper takes (rank, line) and gives what a file holds
Wrapper = Callable[[int, str], str]
ESC = "\x1b"

#: what puts something around NCCL's lines, by who does
WRAPPERS: Mapping[str, Wrapper] = {
    "plain": lambda _, line: line,
    "crlf": lambda _, line: f"{line}\r",
    "ray-colour": lambda r, line: f"{ESC}[36m(RayWorker pid=9{r}, ip=10.0.0.{r}){ESC}[0m {line}",
    "compose-colour": lambda r, line: f"{ESC}[3{r + 1}mworker-{r}  | {ESC}[0m{line}",
    "compose": lambda r, line: f"worker-{r}  | {line}",
    "docker-json-file": lambda _, line: json.dumps(
        {"log": f"{line}\n", "stream": "stdout", "time": "2026-11-30T15:08:17.123Z"}
    ),
    "cloud-json": lambda _, line: json.dumps({"severity": "INFO", "message": line, "pod": "x-0"}),
    "nested-json": lambda r, line: json.dumps({"kubernetes": {"pod": f"w{r}"}, "log": line}),
    "cri": lambda _, line: f"2026-11-30T15:08:17.123456789Z stdout F {line}",
    "kubectl": lambda r, line: f"[pod/sgl-{r}/main] 2026-11-30T15:08:17.123456789Z {line}",
    "journald": lambda r, line: f"Nov 30 15:08:17 node python3[77{r}]: {line}",
    "torchrun": lambda r, line: f"[default{r}]:{line}",
    "mpirun": lambda r, line: f"[1,{r}]<stdout>:{line}",
    "srun": lambda r, line: f"{r}: {line}",
    "vllm": lambda r, line: f"(Worker_TP{r} pid=77{r}) {line}",
    "vllm-colour": lambda r, line: f"{ESC}[1;36m(VllmWorker TP{r} pid=77{r}){ESC}[0;0m {line}",
    "grep": lambda r, line: f"logs/rank{r}.log:12:{line}",
    "quoted-in-a-report": lambda _, line: f"> {line}",
    "loguru": lambda _, line: f"{ESC}[32m15:08:17{ESC}[0m | {ESC}[1mINFO{ESC}[0m | {line}{ESC}[0m",
    "nccl-timestamp": lambda _, line: f"[2026-11-30 15:08:17] {line}",
    "progress-bar": lambda _, line: f"\rLoading shards:  50% | 1/2 [00:01<00:01, 1.2s/it]{line}",
}  # fmt: skip


def recorded(name: str, rank: int) -> list[str]:
    """Lines of a log recorded on 2 x H200."""
    return (RECORDED / f"{name}.rank{rank}.log").read_text().splitlines()


def interleaved(files: Sequence[Sequence[str]], wrapper: Wrapper, seed: int = 0) -> str:
    """Several ranks in one file, as one terminal shows them."""
    chance = random.Random(seed)
    queues = [[(rank, line) for line in lines] for rank, lines in enumerate(files)]
    mixed = []
    while any(queues):
        rank, line = chance.choice([queue for queue in queues if queue]).pop(0)
        mixed.append((rank, line))
        # the matrix of enabled algorithms is one write, without a prefix on its lines
        while queues[rank] and "NCCL" not in queues[rank][0][1]:
            mixed.append(queues[rank].pop(0))
    return "".join(f"{wrapper(rank, line)}\n" for rank, line in mixed)


def _init(version: tuple[int, int], rank: int, ranks: int, comm: str, ident: str, end: str) -> str:
    """The line that begins or ends a communicator; its form changed seven times."""
    nvml = "" if version < (2, 19) else f" nvmlDev {rank}"
    named = {True: "", False: "ncclCommInitRank "}[version < (2, 20)]
    if version >= (2, 28) and end == "START":
        named = f"[Rank {rank}] {named}"
    return (
        f"{named}comm {comm} rank {rank} nranks {ranks} cudaDev {rank}{nvml} busId {rank}1000 "
        f"commId {ident} - Init {end}"
    )


def _choice(version: tuple[int, int], size: int) -> str | None:
    if version < (2, 20):
        return None
    if version < (2, 23):
        return f"{size} Bytes -> Algo 1 proto 0 time 37.200001"
    if version < (2, 24):
        return f"AllReduce: {size} Bytes -> Algo 1 proto 0 time 37.200001"
    return f"AllReduce: {size} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..1}}"


def rank_lines(
    version: str,
    rank: int,
    ranks: int = 4,
    env: Mapping[str, str] | None = None,
    *,
    host: str = "gpu-host",
    pid: int = 4000,
    via: str = "SHM/direct/direct",
    comms: Sequence[tuple[str, str]] = (("0x55d0aa", "0x9f1"),),
    tuning: bool = True,
    complete: bool = True,
) -> list[str]:
    """What one rank of an older or newer NCCL prints; ``env`` as NCCL would print it."""
    numbers = (int(version.split(".")[0]), int(version.split(".")[1]))
    said = [f"NCCL version {version}+cuda12.4"]
    for index, (comm, ident) in enumerate(comms):
        if numbers >= (2, 19):
            said.append(_init(numbers, rank, ranks, comm, ident, "START"))
        if index == 0:
            for name, value in (env or {}).items():
                dot = "." if value.lstrip("-").isdigit() and name != "NCCL_P2P_DISABLE" else ""
                said.append(f"{name} set by environment to {value}{dot}")
        said.append(f"Channel 00/02 : {' '.join(map(str, range(ranks)))}")
        said.append(f"Trees [0] 1/-1/-1->{rank}->-1 [1] 1/-1/-1->{rank}->-1")
        after = (rank + 1) % ranks
        said += [f"Channel 0{c} : {rank}[{rank}] -> {after}[{after}] via {via}" for c in (0, 1)]
        collnet = "2 collnet channels, " if numbers < (2, 29) else ""
        said.append(
            f"2 coll channels, {collnet}0 nvls channels, 2 p2p channels, 2 p2p channels per peer"
        )
        if complete:
            said.append(_init(numbers, rank, ranks, comm, ident, "COMPLETE"))
        choice = _choice(numbers, 14336)
        if tuning and rank == 0 and choice is not None:
            said += [choice] * 3
    return [f"{host}:{pid + rank}:{pid + rank} [{rank}] NCCL INFO {line}" for line in said]
