"""A recording out of a study's database: every repeat, warm-up left out."""

from autotune.backends.recording import Recorded, Recording
from autotune.errors import UserError
from autotune.store.store import Store


def recording_of_study(url: str, name: str) -> Recording:
    """All repeats of the study called ``name``, in the order taken, failures included.

    The provenance is that of the first trial that has one. Raises ``UserError`` for a database or
    study that is not there, or one without repeats.
    """
    store = Store.existing(url)
    try:
        view = store.study(name)
        trials = {trial.number: trial for trial in store.trials(view.id)}
        repeats = tuple(
            Recorded(trials[taken.trial].knobs, view.workloads[taken.concurrency], taken)
            for taken in store.measurements([trial.id for trial in trials.values()])
            if taken.repeat >= 0
        )
        found = (store.provenance(trial.id) for trial in trials.values())
        provenance = next((each for each in found if each is not None), None)
    finally:
        store.close()
    if not repeats:
        raise UserError(f"study {name!r} holds no measurement; start or resume it first")
    return Recording(repeats, provenance)
