"""NCCL's configuration files: variables that reach NCCL without any environment.

NCCL loads them with ``setenv(name, value, 0)`` before it first reads a variable, so the process
environment wins. NCCL_CONF_FILE (2.23 and newer) replaces ~/.nccl.conf; /etc/nccl.conf comes last.
Source: NVIDIA/nccl src/misc/param.cc (read, facts only).
"""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM_FILE = Path("/etc/nccl.conf")


@dataclass(frozen=True, slots=True)
class FileSetting:
    """One line of a configuration file."""

    name: str
    value: str
    evidence: str


def nccl_files(env: Mapping[str, str], system: Path = SYSTEM_FILE) -> tuple[Path, ...]:
    """Files that NCCL would read under ``env``, the strongest first; missing ones included.

    ``~`` is the password file's home up to 2.29 and $HOME from 2.30 on: both, where they differ.
    """
    named = env.get("NCCL_CONF_FILE")
    if named:
        return Path(named), system
    homes = [env.get("HOME") or "", pwd.getpwuid(os.getuid()).pw_dir]
    own = [Path(home) / ".nccl.conf" for home in dict.fromkeys(homes) if home]
    return (*own, system)


def file_settings(
    env: Mapping[str, str], system: Path = SYSTEM_FILE
) -> tuple[dict[str, FileSetting], list[str]]:
    """Variables set by files, the strongest file's value each, and notes on unreadable ones."""
    found: dict[str, FileSetting] = {}
    notes = []
    for path in nccl_files(env, system):
        try:
            text = path.read_bytes().decode("utf-8", "replace")
        except FileNotFoundError:
            if env.get("NCCL_CONF_FILE") == str(path):
                notes.append(f"NCCL_CONF_FILE={path} does not exist: NCCL reads nothing from it")
            continue
        except OSError as error:
            notes.append(f"{path}: {error.strerror}")
            continue
        for number, line in enumerate(text.split("\n"), 1):
            name, equals, value = line.partition("=")
            if not equals or line.startswith("#"):
                continue
            where = f"{path}:{number}"
            if name != name.strip() or " " in name:
                # NCCL takes the line as it stands, spaces and "export" included
                plain = name.strip().removeprefix("export").strip()
                notes.append(
                    f"{where} sets a variable named {name!r}, which nobody reads: write "
                    f"{plain}={value.strip()} without spaces"
                )
                continue
            if value != value.strip() or (value[:1] in "'\"" and value):
                notes.append(f"{where}: the value is {value!r}, spaces and quotes included")
            found.setdefault(name, FileSetting(name, value, where))
    return found, notes
