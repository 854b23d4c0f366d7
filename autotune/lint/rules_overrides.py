"""Variables that a server overwrites, never hands on, or hides."""

from collections.abc import Iterator

from autotune.effect.server_sets import overwritten
from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.setup import Setup


@rule("env-overwritten", "servers.md A.5 and B.3 (engine.py _set_envs_and_config), read")
def lost_to_the_server(setup: Setup) -> Iterator[Hit]:
    """What the server itself sets over the user's value, in the parent, before workers start."""
    for change in overwritten(setup.engine, setup.command, setup.env):
        yield warning(
            f"{change.name}={change.asked}",
            f"not effective: {change.reason}; the workers get {change.name}={change.becomes}",
            change.fix,
        )


@rule(
    "env-lost",
    "servers.md C.1; sudo, env and docker hand on what they are told to",
    "sglang",
    "vllm",
)
def lost_on_the_way(setup: Setup) -> Iterator[Hit]:
    """A wrapper in front of the server drops the environment."""
    by_wrapper: dict[str, list[str]] = {}
    for name, wrapper in setup.lost.items():
        if name.startswith(("NCCL_", "CUDA_", "SGLANG_", "VLLM_")):
            by_wrapper.setdefault(wrapper, []).append(name)
    for wrapper, names in by_wrapper.items():
        yield error(
            ", ".join(sorted(names)),
            f"not effective: dropped by {wrapper}, the server never sees it",
            "hand it on (sudo -E, docker run -e NAME, env without -i), or put NCCL's into "
            "/etc/nccl.conf where the server runs",
        )


@rule("env-ray", "vllm-project/vllm#15525", "vllm")
def ray_workers(setup: Setup) -> Iterator[Hit]:
    """Ray starts workers from its own daemon: only what the server copies gets there."""
    backend = setup.command.text("--distributed-executor-backend")
    names = sorted(n for n in setup.env if n.startswith(("NCCL_", "CUDA_", "VLLM_NCCL")))
    if backend == "ray" and names:
        yield warning(
            ", ".join(names),
            "Ray's workers are children of its daemon, not of this shell: a variable that is not "
            "copied on purpose is absent there (VLLM_NCCL_SO_PATH was)",
            "start `ray start` itself with them, or put NCCL's into a file (NCCL_CONF_FILE or "
            "/etc/nccl.conf on each node); prove it with `autotune env check` on the NCCL logs",
        )


@rule("nccl-library-scope", "vllm-project/vllm#15525; servers.md A.4", "sglang", "vllm")
def library_path(setup: Setup) -> Iterator[Hit]:
    """The library path reaches the server's own wrapper only, not torch's communicators."""
    name = "SGLANG_NCCL_SO_PATH" if setup.engine == "sglang" else "VLLM_NCCL_SO_PATH"
    if name in setup.env:
        yield info(
            f"{name}={setup.env[name]}",
            "it changes the server's pynccl only; torch.distributed keeps the libnccl it was built "
            "with, so one process may map two NCCL versions",
            "look at the mapped libnccl of every worker (/proc/<pid>/maps, or `autotune env check "
            "--run`), not at the variable",
        )


@rule("env-hidden", "servers.md 0.1: setproctitle zeroes the environ area", "sglang", "vllm")
def environ_is_blank(setup: Setup) -> Iterator[Hit]:
    """/proc/<pid>/environ of these workers shows NUL bytes although the variables are there."""
    asked = sorted(n for n in setup.env if n.startswith("NCCL_") and "DEBUG" not in n)
    if asked and setup.env.get("SPT_NOENV") in (None, "", "0"):
        yield info(
            ", ".join(asked),
            "after start /proc/<pid>/environ of the workers is blank (setproctitle), which looks "
            "as if the variables had not arrived; they have",
            "start with SPT_NOENV=1 to see them, or read NCCL's log (`autotune env check`)",
        )


@rule("deterministic-slow", "servers.md A.5", "sglang")
def deterministic_costs(setup: Setup) -> Iterator[Hit]:
    """Deterministic inference gives up the fast all-reduce paths."""
    if setup.command.has("--enable-deterministic-inference"):
        yield info(
            "--enable-deterministic-inference",
            "NCCL_ALGO becomes allreduce:tree and the custom all-reduce is off: slower reductions "
            "than a server without it",
            "compare it with a baseline that has it too",
        )


@rule("env-batch-invariant", "servers.md B.3", "vllm")
def batch_invariant(setup: Setup) -> Iterator[Hit]:
    """Batch-invariant mode pins NCCL to one channel."""
    if setup.env.get("VLLM_BATCH_INVARIANT", "0") in ("1", "true", "True"):
        yield warning(
            "VLLM_BATCH_INVARIANT=1",
            "vLLM sets NCCL_PROTO=Simple, one channel and one thread: every all-reduce is several "
            "times slower",
            "leave it off where speed is measured",
        )


@rule("pynccl-off", "servers.md B.3", "vllm")
def pynccl_disabled(setup: Setup) -> Iterator[Hit]:
    """Without pynccl the all-reduce cannot be captured."""
    if setup.env.get("VLLM_DISABLE_PYNCCL", "0").lower() in ("1", "true"):
        yield error(
            "VLLM_DISABLE_PYNCCL=1",
            "torch.distributed then carries the all-reduce, outside vLLM's graph capture rules",
            "unset it",
        )
