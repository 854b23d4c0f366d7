"""YAML text with the line of every key, so that an error can say where it is.

Read as YAML 1.2 where 1.1 surprises people: ``off``, ``on``, ``yes`` and ``no`` are words,
``1:30`` is text, and a key given twice is refused instead of the last one winning.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import UserError

_FLOAT = (
    r"^[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
    r"|^\.(?:nan|NaN|NAN)$"
)

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the booleans and numbers of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":int", ":float"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


@dataclass(frozen=True)
class YamlSource:
    """Parsed YAML and where each key stood."""

    #: as it is shown in messages
    label: str
    text: str
    data: Any
    #: 1-based line of each key path
    lines: dict[KeyPath, int]

    def place(self, path: KeyPath) -> str:
        """``file:line`` of ``path``, or of its nearest parent that is in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.label}:{self.lines[path]}" if path in self.lines else self.label


def read_yaml(path: Path) -> YamlSource:
    """Read a YAML file.

    Raises ``UserError`` with file, line and reason when it can't be read or parsed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, label: str) -> YamlSource:
    """Parse YAML ``text``; ``label`` names it in messages."""
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                _walk(node, (), lines, label)
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{label}:{mark.line + 1}" if mark else label
        raise UserError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{label}: not valid YAML: {reason}") from None
    except RecursionError:
        raise UserError(
            f"{label}: nested too deeply, or an anchor (&) that holds an alias (*) of itself; "
            f"write the values out"
        ) from None
    return YamlSource(label=label, text=text, data=data, lines=lines)


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], label: str) -> None:
    """Record the line of every key below ``node``; refuse duplicate keys."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = (*path, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key in lines:
                dotted = ".".join(map(str, key))
                raise UserError(
                    f"{label}:{line}: {dotted} is given twice (also in line {lines[key]}); keep one"
                )
            lines[key] = line
            _walk(value_node, key, lines, label)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, label)
