"""How long explain and diff take on a database of 10,000 measurements (bar: 2 s each).

python bench/explain_diff_speed.py [--measurements N]

Prints seconds of the functions behind the commands (first call of a fresh process, imports apart)
and of the whole commands as a user starts them. CPU seconds are given beside wall seconds: on a
busy machine only they tell.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BAR_S = 2.0

_FUNCTION = """
import io, sys, time
from rich.console import Console
from autotune.diff.compare import compare
from autotune.diff.render import show as show_diff
from autotune.diff.resolve import Resolver
from autotune.explain.explanation import explain
from autotune.explain.render import show
from autotune.explain.subject import open_study, trial_subject
from autotune.store.store import Store
url, what = sys.argv[1:]
screen = Console(width=100, file=io.StringIO(), markup=False)
wall, cpu = time.perf_counter(), time.process_time()
if what == "explain":
    context = open_study(Store.existing(url), "made")
    show(explain(trial_subject(context, context.trial("5"), None)), screen)
else:
    resolver = Resolver(url, "made")
    show_diff(compare(resolver.run("0"), resolver.run("7")), screen)
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measurements", type=int, default=10_000)
    count = parser.parse_args().measurements
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from explain_database import add_trial, fill, make_study

    with tempfile.TemporaryDirectory() as folder:
        made = make_study(Path(folder))
        add_trial(made, made.plan.baseline, role="baseline")
        fill(made, count, repeats=20)
        url = made.store.url
        size = len(made.store.repeats(made.view.id))
        print(f"{made.num_trials} trials, {size} measurements in {url}")
        failed = False
        for what in ("explain", "diff"):
            wall, cpu = _function(url, what)
            failed |= cpu > BAR_S
            print(f"{what:8} function: {wall:.2f} s wall, {cpu:.2f} s CPU (bar {BAR_S:.0f} s)")
        for arguments in (["explain", "5"], ["diff", "0", "7"]):
            wall, cpu = _command([*arguments, "--database", url])
            print(
                f"{arguments[0]:8} command:  {wall:.2f} s wall, {cpu:.2f} s CPU, imports included"
            )
    sys.exit(failed)


def _function(url: str, what: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", _FUNCTION, url, what], capture_output=True, text=True, check=True
    )
    wall, cpu = (float(part) for part in done.stdout.split()[-2:])
    return wall, cpu


def _command(arguments: list[str]) -> tuple[float, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "autotune.cli.main", *arguments],
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


if __name__ == "__main__":
    main()
