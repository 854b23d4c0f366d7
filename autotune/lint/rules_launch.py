"""How the server is started: what reaches it, which GPUs it sees, what its container gives it."""

import re
from collections.abc import Iterator

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.setup import Setup

_DOCKER = "docs.vllm.ai, Deploying with Docker: --ipc=host or --shm-size for tensor parallelism"
_NUMACTL = {
    "-N": "cpus", "--cpunodebind": "cpus", "-m": "memory", "--membind": "memory",
    "-p": "memory", "--preferred": "memory",
}  # fmt: skip


@rule("env-not-exported", "POSIX sh: children get exported variables only", "sglang", "vllm")
def set_but_not_exported(setup: Setup) -> Iterator[Hit]:
    """NAME=VALUE on a line of its own stays in the shell."""
    names = [name for name in setup.pasted.not_exported if name not in setup.env]
    if names:
        yield error(
            ", ".join(f"{name}={setup.pasted.not_exported[name]}" for name in names),
            "not effective: set on a line of its own and not exported, so it stays in the shell "
            "and the server never sees it",
            f"export {names[0]}=…, or write it in front of the command on the same line",
        )


@rule("env-set-too-late", "NVIDIA/nccl#1741, #225: NCCL keeps what it read first")
def set_after_the_first_communicator(setup: Setup) -> Iterator[Hit]:
    """A variable set in a running process after NCCL read it; the lists are read again."""
    for name, value in setup.pasted.late.items():
        if name.startswith("NCCL_") and name not in ("NCCL_ALGO", "NCCL_PROTO"):
            yield error(
                f"{name}={value}",
                "set after the first communicator or engine was made: NCCL reads it once per "
                "process and keeps the value (only NCCL_ALGO and NCCL_PROTO are read again by each "
                "communicator), and workers that run already never see it",
                "set it before the process starts, or above the first import that uses NCCL",
            )


@rule("env-file-unread", "only the text that was given is read", "sglang", "vllm")
def file_not_given(setup: Setup) -> Iterator[Hit]:
    """Variables or options from a file that lint was not given."""
    config = setup.command.text("--config")
    if config and setup.engine == "vllm":
        yield info(
            f"--config {config}",
            "options come from there as well, and they were not given: they are not judged",
            "write them out as options of --args",
        )
    if setup.pasted.files:
        yield info(
            ", ".join(setup.pasted.files),
            "variables come from there as well, and they were not given: what they say about NCCL "
            "is not judged",
            'give them too: --env "$(cat FILE)"',
        )


@rule("program-unknown", "entry points of sglang and vllm", "sglang", "vllm")
def another_program(setup: Setup) -> Iterator[Hit]:
    """A launcher or script of the user's own in front of the options."""
    if setup.pasted.program is not None:
        yield info(
            setup.pasted.program,
            "no entry point of this server: the options are judged as if the server got them, and "
            "unknown ones are taken to be the script's own",
            "give the command line that it starts in the end",
        )


@rule("several-servers", "one server is judged at a time", "sglang", "vllm")
def more_than_one_server(setup: Setup) -> Iterator[Hit]:
    """A script that starts more than one server."""
    if setup.pasted.num_servers > 1:
        yield info(
            f"{setup.pasted.num_servers} server command lines",
            "only the first is judged",
            "give them one at a time",
        )


@rule("gpus-visible", "CUDA: only the devices listed in CUDA_VISIBLE_DEVICES exist")
def more_ranks_than_visible_gpus(setup: Setup) -> Iterator[Hit]:
    """Ranks of this host against the GPUs that its processes can see."""
    ranks = setup.local_ranks
    if ranks is None:
        return
    for subject, count in _visible(setup):
        if ranks > count:
            yield error(
                subject,
                f"{count} GPU{'' if count == 1 else 's'} visible, {ranks} needed on this host "
                f"({setup.ranks_text()}): the server stops at start",
                f"list {ranks} different GPUs, or lower the parallelism",
            )


def _visible(setup: Setup) -> Iterator[tuple[str, int]]:
    """(where it is said, GPUs that remain). The list ends at the first entry that is no GPU."""
    listed = setup.env.get("CUDA_VISIBLE_DEVICES")
    if listed is not None and listed.lower() not in ("all", "void", "none") and "$" not in listed:
        seen: list[str] = []
        for part in (part.strip() for part in listed.split(",")):
            if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", part):
                break
            if part not in seen:
                seen.append(part)
        yield f"CUDA_VISIBLE_DEVICES={listed}", len(seen)
    container = setup.pasted.container
    if container is not None and container.gpus is not None:
        yield f"--gpus with {container.gpus} GPUs", container.gpus


@rule("container-shared-memory", _DOCKER, "sglang", "vllm")
def too_little_shared_memory(setup: Setup) -> Iterator[Hit]:
    """A container's /dev/shm has 64 MiB; ranks exchange messages and NCCL's SHM buffers there."""
    container = setup.pasted.container
    if container is None or container.shared_memory is not None or not container.complete:
        return
    if (setup.tp or 1) < 2:
        return
    where = "docker run" if container.image_index else "this YAML"
    yield warning(
        f"{where} without shared memory",
        f"a container has 64 MiB of /dev/shm by default; {setup.tp} ranks pass messages through "
        "it, and so does NCCL between GPUs that it joins by host memory (SHM): it fails at start "
        "or under load, or NCCL takes a slower way",
        "--ipc=host, or --shm-size 16g (compose: ipc: host or shm_size; Kubernetes: an emptyDir of "
        "medium Memory on /dev/shm)",
    )


@rule("numa-one-node", "a machine file's sockets; numactl(8)", "sglang", "vllm")
def bound_to_one_socket(setup: Setup) -> Iterator[Hit]:
    """All ranks bound to one node of a host whose GPUs hang on several sockets."""
    if "SYS" not in setup.path_types or setup.machine is None:
        return
    words = setup.pasted.words
    bound: dict[str, str] = {}
    for index, word in enumerate(words):
        if word.rsplit("/", 1)[-1] != "numactl":
            continue
        bound |= _numactl(words[index + 1 :])
    if bound and all(re.fullmatch(r"\d+", node) for node in bound.values()):
        yield info(
            " ".join(f"{option} {node}" for option, node in bound.items()),
            f"every rank is bound to one node, but the GPUs of {setup.machine.name} in use hang on "
            f"{setup.machine.cpu.sockets} sockets: the others launch, and stage through host "
            "memory, across the socket link",
            "bind each rank to its own GPU's node (SGLang and vLLM: --numa-bind or --numa-node "
            "where the version has them), or do not bind",
        )


def _numactl(words: tuple[str, ...]) -> dict[str, str]:
    """Binding options of numactl and their nodes."""
    found: dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        index += 1
        option, equals, value = word.partition("=")
        if not equals and re.fullmatch(r"-[NmpC]\S+", word):
            option, value = word[:2], word[2:]
        elif not equals and option in (*_NUMACTL, "-C", "--physcpubind", "-i", "--interleave"):
            value = words[index] if index < len(words) else ""
            index += 1
        if option in _NUMACTL:
            found[option] = value
    return found


#: variable -> (values that mean off, what it costs)
_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": "every launch waits for its kernel: host and GPU take turns",
    "VLLM_TRACE_FUNCTION": "every Python call of the workers is written to a file",
}


@rule("env-debugging", "CUDA and vLLM documentation: for debugging only", "sglang", "vllm")
def left_over_from_debugging(setup: Setup) -> Iterator[Hit]:
    """Variables that serialise everything, forgotten after a search for a fault."""
    for name, cost in _DEBUGGING.items():
        if setup.env.get(name, "0").lower() not in ("", "0", "false"):
            yield warning(
                f"{name}={setup.env[name]}", f"for debugging: {cost}, so no speed means anything",
                "unset it where speed is measured",
            )  # fmt: skip
    if setup.env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield warning(
            f"TORCH_DISTRIBUTED_DEBUG={setup.env['TORCH_DISTRIBUTED_DEBUG']}",
            "for debugging: torch compares every collective over all ranks before it runs",
            "unset it where speed is measured",
        )
