"""The ``autotune`` command: a sub-command's module is imported only for its own command.

``main`` turns every ``AutotuneError`` into one line on stderr and its exit code.
"""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import typer

from autotune.errors import AutotuneError

#: command -> ("module:attribute", one-line help); a ``typer.Typer`` has sub-commands, a function is
#: a command itself
COMMANDS: Mapping[str, tuple[str, str]] = {
    "study": ("autotune.cli.study:app", "Start, resume, stop and read studies."),
    "lint": ("autotune.cli.lint:lint", "Find faults in a server's command line, without a GPU."),
    "env": ("autotune.cli.env:app", "Check that settings took effect in every worker."),
    "doctor": ("autotune.cli.doctor:doctor", "Find host faults that make serving slow."),
    "probe": ("autotune.cli.probe:probe", "Measure this host and write a machine file."),
    "compare": ("autotune.cli.compare:compare", "Measure two configurations in turns."),
    "diff": ("autotune.cli.diff:diff", "What differs between two runs and what it is worth."),
    "model": ("autotune.cli.model:app", "The performance model: its accuracy and constants."),
    "explain": ("autotune.cli.explain:explain", "Where the time goes and what could be faster."),
    "dashboard": ("autotune.cli.dashboard:dashboard", "Show a study in the browser."),
    "predict": (
        "autotune.cli.predict:predict",
        "Predict knobs, or rank a study, without measuring.",
    ),
}

#: exit code after Ctrl-C, as shells report it
INTERRUPTED = 130

#: the error class of the click that typer uses (its own copy in newer releases)
_CommandLineError: type[Exception] = next(
    cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException"
)


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The command line for ``arguments``; other sub-commands are named but not imported."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)
    app.callback()(_root)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, (target, help_text) in COMMANDS.items():
        if name == chosen:
            module_name, _, attribute = target.partition(":")
            found = getattr(importlib.import_module(module_name), attribute)
            if isinstance(found, typer.Typer):
                app.add_typer(found, name=name, help=help_text)
            else:
                app.command(name)(found)
        else:
            app.command(name, help=help_text)(_unused)
    return app


def _root() -> None:
    """Finds the fastest way to serve a Mixture-of-Experts model with EAGLE-3, and says why."""


def _unused() -> None:
    """Stands for a sub-command that this call does not use."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 2 for mistakes of the user, 1 for failures."""
    words = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal that knows ASCII only shows "?" for a dash instead of ending the command
            stream.reconfigure(errors="replace")
    try:
        command = typer.main.get_command(build_app(words))
        code = command.main(args=words, prog_name="autotune", standalone_mode=False)
    except AutotuneError as error:
        _tell(str(error), error.exit_code, words)
    except _CommandLineError as error:
        error.show()  # type: ignore[attr-defined]
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("autotune: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output has gone (| head); nobody is left to tell
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        # a full disk, a file that may not be written, a folder that went away: no bug of ours
        place = f"{error.filename}: " if error.filename is not None else ""
        _tell(f"{place}{error.strerror or error}", 1, words)
    except MemoryError:
        _tell("this host has too little memory for that; ask for less, or free some", 1, words)
    sys.exit(code if isinstance(code, int) else 0)


def _tell(message: str, exit_code: int, words: Sequence[str]) -> NoReturn:
    """One line on stderr for each problem; with --json also one object on stdout. Exits."""
    # the message may be about these very streams: a full disk, a closed pipe
    with contextlib.suppress(OSError):
        for line in message.splitlines():
            print(f"autotune: {line}", file=sys.stderr)
    with contextlib.suppress(OSError):
        if "--json" in words:
            print(json.dumps({"error": message, "exit_code": exit_code}, indent=2), flush=True)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
