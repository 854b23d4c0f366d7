"""What a server sets or overwrites by itself between the shell and its workers.

Source: sglang 0.5.9 and 0.5.23 entrypoints/engine.py ``_set_envs_and_config`` (in the parent,
before workers are spawned), vllm 0.33 batch-invariant mode; read, facts only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.lint.command import Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A variable the user set and the server replaces."""

    name: str
    asked: str
    becomes: str
    reason: str
    fix: str


def server_environment(engine: str, command: Command, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that the server sets by itself under this command and environment."""
    if engine == "sglang":
        return _sglang(command, env)
    if engine == "vllm" and env.get("VLLM_BATCH_INVARIANT", "0").lower() in ("1", "true"):
        return {
            "NCCL_PROTO": "Simple",
            "NCCL_ALGO": "ring,tree;allreduce:tree",
            "NCCL_MIN_NCHANNELS": "1",
            "NCCL_MAX_NCHANNELS": "1",
            "NCCL_NTHREADS": "1",
        }
    return {}


def overwritten(engine: str, command: Command, env: Mapping[str, str]) -> Iterator[Change]:
    """Of what the user set, what the server replaces by another value."""
    reasons = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "SGLang always sets it to 8",
        "CUDA_MODULE_LOADING": "SGLang always sets it to AUTO",
        "NCCL_CUMEM_ENABLE": "--enable-symm-mem sets it",
        "NCCL_NVLS_ENABLE": "--enable-nccl-nvls or --enable-symm-mem sets it",
        "NCCL_ALGO": "--enable-deterministic-inference sets it",
        "NCCL_MIN_NCHANNELS": "--enable-deterministic-inference sets it",
        "NCCL_MAX_NCHANNELS": "--enable-deterministic-inference sets it",
    }
    for name, value in server_environment(engine, command, env).items():
        asked = env.get(name)
        if asked is not None and asked != value:
            yield Change(
                name=name,
                asked=asked,
                becomes=value,
                reason=reasons[name] if engine == "sglang" else "batch-invariant mode sets it",
                fix="drop it: no value of yours can arrive"
                if name.startswith("CUDA_")
                else "drop it, or the option that overwrites it",
            )


#: (variable, value) -> the server's option that sets it, where no user is likely to
_SETTERS = {
    ("NCCL_ALGO", "allreduce:tree"): "SGLang's --enable-deterministic-inference sets this value",
    ("NCCL_ALGO", "ring,tree;allreduce:tree"): "vLLM's batch-invariant mode sets this value",
    ("NCCL_PROTO", "Simple"): "vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT=1), a launcher or "
    "a configuration file sets this value",
    ("NCCL_CUMEM_ENABLE", "1"): "SGLang's --enable-symm-mem sets this value",
    ("NCCL_CUMEM_ENABLE", "0"): "SGLang and vLLM set it to 0 where it is unset when they start",
    ("NCCL_NVLS_ENABLE", "1"): "SGLang's --enable-nccl-nvls and --enable-symm-mem set this value",
    ("NCCL_NVLS_ENABLE", "0"): "SGLang sets it to 0 where it is unset when it starts",
}


def setter_of(name: str, value: str) -> str | None:
    """Which server's option is known to set a variable to a value that nobody asked for."""
    return _SETTERS.get((name, value.lower() if name == "NCCL_ALGO" else value))


def _sglang(command: Command, env: Mapping[str, str]) -> dict[str, str]:
    symmetric = command.has("--enable-symm-mem")
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_MODULE_LOADING": "AUTO"}
    found["NCCL_CUMEM_ENABLE"] = "1" if symmetric else env.get("NCCL_CUMEM_ENABLE", "0")
    nvls = symmetric or command.has("--enable-nccl-nvls")
    found["NCCL_NVLS_ENABLE"] = "1" if nvls else env.get("NCCL_NVLS_ENABLE", "0")
    if command.has("--enable-deterministic-inference"):
        found["NCCL_ALGO"] = "allreduce:tree"
    return found
