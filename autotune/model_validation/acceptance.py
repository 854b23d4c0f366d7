"""Published accept lengths: rates learnt from other rows (or the prior), these rows predicted.

Rows of the same draft, data set and temperature tell most, rows of the same draft on other data
sets less, other drafts only where drafts lie in general: how far groups differ is estimated from
the training rows themselves.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.errors import UserError
from autotune.model_validation.scores import Outcome
from model.acceptance import MAX_DEPTHS, MAX_RANKS, AcceptanceModel
from model.observations import AcceptanceCounts, AcceptLength
from model.spec import Knobs

Array = NDArray[np.float64]
#: relative spread of published accept lengths of one setting; and between the data sets of a draft
_REPORT_SD = 0.04
_DATASET_SD = 0.12
#: a row of another draft only says where drafts lie in general
_OTHER_DRAFT_SD = 0.3
#: spread of logit first rates between drafts before any was seen
_GROUP_SD = 0.5
#: verifies that a published per-position rate is worth
_VERIFIES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRow:
    """One published accept length, bonus token included."""

    draft: tuple[str, str]
    workload: tuple[str, str]
    steps: int
    topk: int
    draft_tokens: int
    tau: float
    #: cumulative acceptance by depth, empty where it is not stated
    per_position: tuple[float, ...]

    @property
    def tree(self) -> tuple[int, int, int]:
        """(steps, topk, draft_tokens)."""
        return self.steps, self.topk, self.draft_tokens

    def told(self, rel_sd: float) -> "AcceptLength | AcceptanceCounts":
        """What the row tells: rates by depth where stated, else its accept length."""
        if self.topk == 1 and self.per_position and rel_sd <= _REPORT_SD:
            reached = tuple(round(_VERIFIES * share) for share in self.per_position)
            return AcceptanceCounts(
                steps=self.steps,
                topk=1,
                draft_tokens=self.draft_tokens,
                num_verifies=_VERIFIES,
                accepted_by_depth=reached,
            )
        return AcceptLength(
            steps=self.steps,
            topk=self.topk,
            draft_tokens=self.draft_tokens,
            accept_length=self.tau,
            rel_sd=rel_sd,
        )


def predict_acceptance(data: Sequence[Path], train: Sequence[Path]) -> Outcome:
    """Predict the accept length of every row that names its tree. Raises ``UserError``."""
    skipped: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    rows = [row for path in data for row in read_acceptance(path, skipped)]
    if not rows:
        why = "; ".join(f"{count} rows: {reason}" for reason, count in skipped.items())
        raise UserError(f"{', '.join(map(str, data))}: no row to predict: {why}")
    seen = [row for path in train for row in read_acceptance(path, left_out)]
    notes = [] if seen else ["acceptance rates are priors: no --fit file holds accept lengths"]
    notes += [f"--fit: left out {count} rows: {reason}" for reason, count in left_out.items()]
    models = _Models(seen)
    quantiles = np.zeros((3, len(rows)))
    groups = []
    for n, row in enumerate(rows):
        model, group = models.of(row)
        spread = _REPORT_SD * np.random.default_rng(7).standard_normal(len(model.samples))
        tau = model.accept_length_samples(*row.tree) * np.exp(spread)
        quantiles[:, n] = np.clip(np.quantile(tau, [0.05, 0.5, 0.95]), 1.0, row.steps + 1.0)
        groups.append(group)
    return Outcome(
        unit="tokens per verify",
        measured=np.array([row.tau for row in rows]),
        quantiles=quantiles,
        labels=tuple(
            f"{' / '.join(row.draft)}, {' '.join(row.workload).strip()}, steps {row.steps}, "
            f"topk {row.topk}, {row.draft_tokens} tokens"
            for row in rows
        ),
        groups=tuple(groups),
        headline=np.ones(len(rows), dtype=bool),
        skipped=dict(skipped),
        notes=tuple(notes),
    )


class _Models:
    """Acceptance models by draft and workload, built when first asked for."""

    def __init__(self, seen: Sequence[AcceptanceRow]) -> None:
        self._drafts: dict[tuple[str, str], list[AcceptanceRow]] = defaultdict(list)
        for row in seen:
            self._drafts[row.draft].append(row)
        self._general = _general(self._drafts.values())
        self._built: dict[object, AcceptanceModel] = {}

    def of(self, row: AcceptanceRow) -> tuple[AcceptanceModel, str]:
        """The model of a row, and what it was learnt from."""
        same_draft = self._drafts.get(row.draft, [])
        same = [other for other in same_draft if other.workload == row.workload]
        key = (row.draft, row.workload)
        if key not in self._built:
            rest = [o.told(_DATASET_SD) for o in same_draft if o.workload != row.workload]
            told = [*(_weaker(rest)), *(other.told(_REPORT_SD) for other in same)]
            self._built[key] = self._general.update(told)
        if same:
            return self._built[key], "draft and data set seen in other trees"
        if same_draft:
            return self._built[key], "draft seen on other data sets"
        return self._built[key], "draft not seen"


def _weaker(
    lengths: Sequence[AcceptLength | AcceptanceCounts],
) -> list[AcceptLength | AcceptanceCounts]:
    """Many rows of other data sets tell the draft's mean, and no more than their spread allows."""
    factor = max(1.0, len(lengths) / 4) ** 0.5
    return [
        replace(one, rel_sd=one.rel_sd * factor) if isinstance(one, AcceptLength) else one
        for one in lengths
    ]


def _general(drafts: Iterable[Sequence[AcceptanceRow]]) -> AcceptanceModel:
    """Where drafts lie in general: the mean over drafts, as wide as drafts differ."""
    prior = AcceptanceModel.prior()
    groups = list(drafts)
    if not groups:
        return prior
    each = [
        prior.update(_weaker([row.told(_OTHER_DRAFT_SD / 2) for row in rows])) for rows in groups
    ]
    theta = np.array([model.theta for model in each])
    sd = np.sqrt(np.diag(prior.covariance))
    # pseudo-drafts keep few groups from looking alike, and the mean near the prior
    weight = 2.0
    mean = (weight * prior.theta + theta.sum(axis=0)) / (weight + len(groups))
    spread = ((theta - mean) ** 2).sum(axis=0)
    floor = sd**2
    floor[0] = _GROUP_SD**2
    variance = (weight * floor + spread) / (weight + len(groups))
    # the spread of shrunken estimates understates how drafts differ in what they do not tell
    told = np.mean([1 - np.diag(model.covariance) / sd**2 for model in each], axis=0)
    variance = variance + (1 - np.clip(told, 0, 1)) * sd**2
    return replace(prior, theta=mean, covariance=np.diag(variance))


def read_acceptance(path: Path, skipped: Counter[str]) -> list[AcceptanceRow]:
    """Rows whose tree is known; others are counted by reason. Raises ``UserError`` (file, line)."""
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for values in reader:
            row = _row(f"{path} line {reader.line_num}", values)
            if isinstance(row, str):
                skipped[row] += 1
            else:
                rows.append(row)
    return rows


def _row(where: str, values: dict[str, str]) -> AcceptanceRow | str:
    """The row, or why there is nothing to predict."""
    tau = _number(where, "tau", values["tau"])
    steps, topk, tokens = (
        _number(where, name, values[name]) for name in ("steps", "topk", "draft_tokens")
    )
    if tau is None:
        return "tau is not given as one number"
    if steps is None or topk is None:
        return "steps or topk is not given as a number (the tree is unknown)"
    if topk == 1 and tokens is None:
        tokens = steps + 1
    if tokens is None:
        return "draft_tokens is not given as a number (the tree is unknown)"
    tree = (int(steps), int(topk), int(tokens))
    if tree != (steps, topk, tokens):
        raise UserError(f"{where}: steps, topk and draft_tokens must be whole numbers")
    if tree[0] < 1:
        return "steps is 0 (no speculation)"
    if tree[0] > MAX_DEPTHS or tree[1] > MAX_RANKS:
        return f"deeper than {MAX_DEPTHS} or wider than {MAX_RANKS}"
    names = ("speculation.steps", "speculation.topk", "speculation.draft_tokens")
    try:
        knobs = Knobs.of({"speculation.method": "eagle3", **dict(zip(names, tree, strict=True))})
    except ValueError as error:
        return f"no such tree: {error}"
    if knobs.draft_tokens != tree[2]:
        return f"a chain of {tree[0]} steps has {tree[0] + 1} draft_tokens (root included)"
    if not 1.0 <= tau <= min(tree[0] + 1, tree[2]):
        return "tau is not between 1 and what the tree can emit"
    return AcceptanceRow(
        draft=(values["target_model"], values["draft"]),
        workload=(values["dataset"], values["temp"]),
        steps=tree[0],
        topk=tree[1],
        draft_tokens=tree[2],
        tau=tau,
        per_position=_cumulative(values.get("per_position") or "", tree[0], tau),
    )


def _cumulative(text: str, steps: int, tau: float) -> tuple[float, ...]:
    """Cumulative rates by depth, where the text holds them: they must add up to tau."""
    try:
        rates = tuple(float(part) for part in text.split(";"))
    except ValueError:
        return ()
    falls = all(a >= b for a, b in zip((1.0, *rates), rates, strict=False))
    if len(rates) != steps or not falls or abs(1.0 + sum(rates) - tau) > 0.03 * tau:
        return ()
    return rates


def _number(where: str, name: str, text: str) -> float | None:
    """A number, or None where the field is empty or says something else ("chain", "2.5-3")."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not (np.isfinite(value) and value >= 0):
        raise UserError(f"{where}: {name} {text!r} must be finite and not negative")
    return value
