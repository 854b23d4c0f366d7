"""Puts a setup together from texts and files, and runs every rule on it."""

import importlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.lint.arrival import server_environment
from autotune.lint.command import ENGINES, Command, parse_command, parse_env
from autotune.lint.findings import RULES, SEVERITIES, Finding, Rule
from autotune.lint.log_facts import LogFacts, read_log
from autotune.lint.log_signatures import SIGNATURES
from autotune.lint.pasted import read_pasted
from autotune.lint.setup import Setup
from autotune.lint.speculation import resolve
from autotune.lint.versions import parse_version, pinned_nccl

_RULE_MODULES = (
    "rules_flags", "rules_values", "rules_launch", "rules_variables",
    "rules_nccl", "rules_host", "rules_effects", "rules_tree", "rules_draft",
    "rules_graphs", "rules_attention", "rules_overrides", "rules_log", "rules_model",
    "rules_rounds", "rules_nccl_log",
)  # fmt: skip
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user gave, as text."""

    engine: str
    version: str | None = None
    args: str = ""
    env: str = ""
    machine: str | None = None
    target: str | None = None
    logs: Sequence[Path] = field(default=())
    nccl_version: str | None = None
    concurrency: int | None = None
    accept_length: float | None = None
    baseline_tokens_per_s: float | None = None


def load_rules() -> list[Rule]:
    """Import every rule module, whose rules register themselves; all rules in the modules' order.

    Not in that of registering: who imported a rule module before must not change what is shown.
    """
    names = [importlib.import_module(f"autotune.lint.{name}").__name__ for name in _RULE_MODULES]
    return sorted(RULES.values(), key=lambda rule: names.index(rule.function.__module__))


def lint(request: Request) -> list[Finding]:
    """All findings, worst first. Raises ``UserError`` for input that cannot be read."""
    rules = load_rules()
    setup = make_setup(request)
    found = [finding for rule in rules for finding in rule.findings(setup)]
    found += _messages(setup.log)
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return found


def make_setup(request: Request) -> Setup:
    """Everything that the rules may ask. Raises ``UserError``."""
    if request.engine not in ENGINES:
        raise UserError(f"unknown engine {request.engine!r}; known: {', '.join(ENGINES)}")
    log = read_log(request.logs) if request.logs else None
    outer = parse_env(request.env)
    pasted = read_pasted(request.engine, request.args, outer)
    version_text = request.version or (log.version if log is not None else None) or pasted.version
    version = None if version_text is None else parse_version(version_text)
    words = list(pasted.words)
    if request.engine == "engine":
        from autotune.lint.engine_setup import engine_setup

        return engine_setup(request, words, log)
    command, inline = parse_command(request.engine, words, version)
    if request.args.strip() and not (command.options or command.positionals or pasted.late):
        raise UserError(
            f"--args: no {request.engine} server is started in this text; give its command line, "
            "its options, or the YAML, unit or Python that holds them"
        )
    if log is not None and not command.options and log.arguments:
        printed, _ = parse_command(request.engine, _as_words(log.arguments), version)
        command = replace(printed, printed=True, odd=())
    env, lost = server_environment(pasted, outer, inline)
    target_name = request.target or _model_name(command)
    accept_length = request.accept_length
    if accept_length is None and log is not None:
        accept_length = log.accept_length
    machine = load_machine_named(request.machine)
    nccl = request.nccl_version or pinned_nccl(request.engine, version)
    return Setup(
        engine=request.engine,
        command=command,
        version=version,
        pasted=pasted,
        env=env,
        lost=lost,
        speculation=resolve(command, target_name),
        machine=machine,
        target=load_target(request.target),
        target_name=target_name,
        load=request.concurrency,
        nccl_version=nccl or (None if machine is None else machine.software.nccl_version),
        accept_length=accept_length,
        baseline_tokens_per_s=request.baseline_tokens_per_s,
        log=log,
    )


def _messages(log: LogFacts | None) -> list[Finding]:
    """Known messages of a log, each under its own id."""
    if log is None:
        return []
    return [
        Finding(
            id=signature.id,
            severity=signature.severity,
            subject=f"{line} ({where})",
            reason=signature.reason,
            fix=signature.fix,
            source=signature.source,
        )
        for signature in SIGNATURES
        if signature.id in log.signatures
        for line, where in (log.signatures[signature.id],)
    ]


def _as_words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments in force, printed by a server, as the words of a command line."""
    import json

    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False or name == "model_tag":
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, dict):
            words += [flag, json.dumps(value, default=str)]
        elif isinstance(value, list):
            words += [flag, *(str(item) for item in value)]
        else:
            words += [flag, str(value)]
    return words


def _model_name(command: Command) -> str | None:
    named = command.text("--model-path", "--model", "--served-model-name")
    if named:
        return named
    return command.positionals[0] if command.positionals else None


def load_machine_named(name: str | None) -> Any:
    """A machine by file or by the name of a file in studies/machines. Raises ``UserError``."""
    if name is None:
        return None
    from model.machine import load_machine

    path = Path(name)
    if not path.is_file():
        known = sorted(p.stem for p in (_ROOT / "studies" / "machines").glob("*.yaml"))
        path = _ROOT / "studies" / "machines" / f"{Path(name).stem}.yaml"
        if not path.is_file():
            raise UserError(f"no machine file {name}; known: {', '.join(known)}")
    try:
        return load_machine(path)
    except ValueError as problem:
        raise UserError(str(problem)) from None


def load_target(name: str | None) -> Any:
    """A target's shape by folder, or by name in studies/shapes. Raises ``UserError``."""
    if name is None:
        return None
    from model.shapes import ModelShape

    folder = Path(name)
    if not (folder / "config.json").is_file():
        shapes = _ROOT / "studies" / "shapes"
        folder = shapes / name.lower()
        if not (folder / "config.json").is_file():
            known = sorted(p.name for p in shapes.iterdir() if p.is_dir())
            raise UserError(
                f"no target {name}: give a folder with config.json, or one of {', '.join(known)}"
            )
    try:
        return ModelShape.load(folder)
    except ValueError as problem:
        raise UserError(f"target: {problem}") from None


def shown_command(command: Command) -> str:
    """The options as one line."""
    return shlex.join(word for o in command.options for word in (o.written, *o.values))
