"""Python that starts a server's engine: its keywords as options, and what it puts into os.environ.

``LLM(model=…, tensor_parallel_size=8)``, ``sgl.Engine(…)``, ``EngineArgs(…)``, and the order of
``os.environ["NCCL_…"] = …`` against the first communicator.
"""

import ast
import json
from dataclasses import dataclass

from autotune.lint.containers import yaml_text

#: classes whose keywords are the server's options
_ENGINES = frozenset(
    {"LLM", "Engine", "Runtime", "EngineArgs", "AsyncEngineArgs", "ServerArgs", "AsyncLLMEngine"}
)
#: calls after which NCCL has read its variables
_COMMUNICATORS = _ENGINES | {"init_process_group", "new_group", "init_distributed"}
#: options written as the server's short or plain names
_PLAIN = {"model": "--model", "model_path": "--model-path"}


@dataclass(frozen=True, slots=True)
class PythonStart:
    """What a piece of Python says."""

    words: tuple[str, ...]
    env: dict[str, str]
    #: variables set after the first communicator or engine was made
    late: dict[str, str]


def read_python(text: str) -> PythonStart | None:
    """None for a text that is no Python, or starts nothing."""
    if "(" not in text or not any(name in text for name in _COMMUNICATORS):
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    words: list[str] = []
    env: dict[str, str] = {}
    late: dict[str, str] = {}
    started = False
    for node in sorted(_interesting(tree), key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Call):
            if _name(node.func) in _ENGINES and not words:
                words = _words(node)
            started = started or _name(node.func) in _COMMUNICATORS
        else:
            name, value = _assigned(node)
            (late if started else env)[name] = value
    return PythonStart(tuple(words), env, late) if words or started else None


def _interesting(tree: ast.Module) -> list[ast.Call | ast.Assign]:
    """Calls that start something, and assignments to os.environ."""
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    assignments = [node for node in nodes if isinstance(node, ast.Assign)]
    return [
        *(call for call in calls if _name(call.func) in _COMMUNICATORS),
        *(one for one in assignments if _assigned(one)[0]),
    ]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _assigned(node: ast.Assign) -> tuple[str, str]:
    """(variable, value) of ``os.environ[NAME] = VALUE``; ("", "") for anything else."""
    target = node.targets[0]
    if not isinstance(target, ast.Subscript) or _name(target.value) != "environ":
        return "", ""
    name, value = _literal(target.slice), _literal(node.value)
    return (str(name), str(value)) if isinstance(name, str) and value is not None else ("", "")


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _words(call: ast.Call) -> list[str]:
    """Keywords as options; a value that is not written out stays unknown."""
    words: list[str] = []
    for index, value in enumerate(call.args[:1]):
        words += ["--model", str(_literal(value) or f"<argument {index}>")]
    for keyword in call.keywords:
        if keyword.arg is None:
            continue
        flag = _PLAIN.get(keyword.arg, "--" + keyword.arg.replace("_", "-"))
        found = _literal(keyword.value)
        if found is False:
            continue
        if found is True:
            words.append(flag)
        elif isinstance(found, dict):
            words += [flag, json.dumps(found)]
        elif isinstance(found, list | tuple):
            words += [flag, *map(yaml_text, found)]
        else:
            words += [flag, "<unknown>" if found is None else yaml_text(found)]
    return words
