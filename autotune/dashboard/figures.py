"""Plots of a study as plotly figures: prediction against measurement, history, time, knobs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from autotune.dashboard.evidence import LevelEvidence, StudyEvidence, TrialEvidence
from autotune.digits import significant

#: colour-blind safe (Okabe and Ito), one per concurrency
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: parts of a cycle from the bottom of a bar to its top, plain decoding and verify alike
_PART_COLOURS: Mapping[str, str] = {
    "attention": "#009E73",
    "moe": "#CC79A7",
    "allreduce": "#E69F00",
    "head": "#56B4E9",
    "other": "#999999",
    "draft": "#0072B2",
    "extend": "#D55E00",
    "sample": "#F0E442",
    "host_gap": "#000000",
}
#: bars of more trials than these are too thin to read
_MOST_BARS = 30
#: ratio of the largest to the smallest result from which an axis is logarithmic
_LOG_ABOVE = 5.0
#: a bar longer than this many medians is cut off: stacked bars can't be read on a logarithmic axis
_CUT_ABOVE = 4.0


def figures(study: StudyEvidence) -> dict[str, go.Figure]:
    """Id -> figure; a plot whose data are not there yet is left out. Ids keep their order."""
    found = {
        "1.predicted-against-measured": predicted_against_measured(study),
        "2.optimization-history": history(study),
        "3.time-per-cycle": time_per_cycle(study),
        "4.parallel-coordinates": parallel_coordinates(study),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def predicted_against_measured(study: StudyEvidence) -> go.Figure | None:
    """Every trial and level: on the diagonal the model was right. Bars: 90 % and 95 % intervals."""
    figure = go.Figure()
    ends: list[float] = []
    for index, concurrency in enumerate(study.concurrencies):
        points = [
            (trial, level)
            for trial, level in _at(study, concurrency)
            if level.predicted is not None and level.tokens_per_s is not None
        ]
        if not points:
            continue
        x = [level.predicted.tokens_per_s for _, level in points if level.predicted]
        y = [level.tokens_per_s for _, level in points if level.tokens_per_s]
        ends += [i.median for i in x] + [s.median for s in y]
        figure.add_scatter(
            x=[i.median for i in x],
            y=[s.median for s in y],
            error_x=_bars([i.high - i.median for i in x], [i.median - i.low for i in x]),
            error_y=_bars([s.high - s.median for s in y], [s.median - s.low for s in y]),
            mode="markers",
            name=f"concurrency {concurrency}",
            marker={
                "color": _COLOURS[index % len(_COLOURS)],
                "size": 9,
                "symbol": ["diamond" if t.trial.role in ("baseline", "aa") else "circle"
                           for t, _ in points],
            },
            text=[_hover(trial) for trial, _ in points],
            hovertemplate="%{text}<br>predicted %{x:.4r} tok/s<br>measured %{y:.4r} tok/s",
        )  # fmt: skip
    if not ends:
        return None
    low, high = min(ends) * 0.85, max(ends) * 1.18
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        name="prediction = measurement",
        line={"color": "#888888", "dash": "dash"},
        hoverinfo="skip",
    )
    _axes(
        figure,
        "Predicted against measured",
        "predicted before measuring, tok/s (bar: 90 % interval)",
        "measured, tok/s (bar: 95 % CI)",
    )
    _scale(figure, low, high, x_too=True)
    return figure


def history(study: StudyEvidence) -> go.Figure | None:
    """Measured tok/s by trial, the best so far and the baseline, per level."""
    figure = go.Figure()
    for index, concurrency in enumerate(study.concurrencies):
        colour = _COLOURS[index % len(_COLOURS)]
        points = [
            (trial, level.tokens_per_s)
            for trial, level in _at(study, concurrency)
            if level.tokens_per_s is not None and trial.trial.state != "failed"
        ]
        if not points:
            continue
        numbers = [trial.trial.number for trial, _ in points]
        figure.add_scatter(
            x=numbers,
            y=[s.median for _, s in points],
            error_y=_bars(
                [s.high - s.median for _, s in points], [s.median - s.low for _, s in points]
            ),
            mode="markers",
            name=f"concurrency {concurrency}",
            marker={"color": colour, "size": 8},
            text=[_hover(trial) for trial, _ in points],
            hovertemplate="%{text}<br>%{y:.4r} tok/s",
        )
        best = [max(s.median for _, s in points[: i + 1]) for i in range(len(points))]
        figure.add_scatter(
            x=numbers,
            y=best,
            mode="lines",
            line={"color": colour, "shape": "hv", "width": 1.5},
            name=f"best so far, concurrency {concurrency}",
            hoverinfo="skip",
        )
        base = study.baseline(concurrency)
        if base is not None:
            figure.add_scatter(
                x=[numbers[0], numbers[-1]],
                y=[base.median] * 2,
                mode="lines",
                line={"color": colour, "dash": "dot", "width": 1},
                name=f"baseline, concurrency {concurrency}",
                hoverinfo="skip",
            )
    if not figure.data:
        return None
    _axes(figure, "Optimisation history", "trial", "measured, tok/s (bar: 95 % CI)")
    medians = [value for trace in figure.data if trace.mode == "markers" for value in trace.y]
    _scale(figure, 0.9 * min(medians), 1.1 * max(medians))
    return figure


def time_per_cycle(study: StudyEvidence) -> go.Figure | None:
    """At the lowest level: measured ms per token by term, stacked, one bar per trial.

    Per token, so that plain decoding and speculation compare: a cycle's time over what it emits.
    """
    if not study.concurrencies:
        return None
    concurrency = study.concurrencies[0]
    rows = [
        (trial, level)
        for trial, level in _at(study, concurrency)
        if level.repeats and any(level.term_ms(name) is not None for name in level.terms)
    ][-_MOST_BARS:]
    terms: dict[str, str] = {}
    for _, level in rows:
        for name in level.terms:
            terms.setdefault(name, name.replace("verify.", "").replace("decode.", ""))
    figure = go.Figure()
    labels = [f"{trial.trial.number}: {_tree(trial)}" for trial, _ in rows]
    parts = set(terms.values())
    order = [*(p for p in _PART_COLOURS if p in parts), *sorted(parts - set(_PART_COLOURS))]
    for part in order:
        names = [name for name, short in terms.items() if short == part]
        figure.add_bar(
            x=labels,
            y=[_per_token(level, names) for _, level in rows],
            name=part,
            marker={"color": _PART_COLOURS.get(part, "#AAAAAA")},
            hovertemplate="%{x}<br>" + part + ": %{y:.3r} ms per token",
        )
    if not rows:
        return None
    title = f"Where the time goes at concurrency {concurrency} (measured)"
    _axes(figure, title, "trial", "ms per emitted token of a request")
    figure.update_layout(barmode="stack")
    figure.update_xaxes(type="category", tickangle=-35)
    cut_long_bars(figure, labels, [_per_token(level, list(level.terms)) for _, level in rows])
    return figure


def cut_long_bars(figure: go.Figure, labels: Sequence[str], heights: Sequence[float]) -> None:
    """End the axis where a few long bars would hide the others; their heights stand in them."""
    top = _CUT_ABOVE * statistics.median(heights)
    long = [(label, height) for label, height in zip(labels, heights, strict=True) if height > top]
    if not long or not top:
        return
    figure.update_yaxes(range=[0, top])
    for label, height in long:
        figure.add_annotation(
            x=label, y=0.97 * top, text=f"{significant(height)} ms ↑", textangle=-90,
            showarrow=False, yanchor="top", bgcolor="white", opacity=0.9,
        )  # fmt: skip


def parallel_coordinates(study: StudyEvidence) -> go.Figure | None:
    """Every knob that varies as an axis, measured tok/s of the lowest level as the colour."""
    if not study.concurrencies:
        return None
    concurrency = study.concurrencies[0]
    rows = [
        (trial.trial.knobs.values(), level.tokens_per_s.median)
        for trial, level in _at(study, concurrency)
        if level.tokens_per_s is not None and trial.trial.state != "failed"
    ]
    if len(rows) < 2:
        return None
    names = [n for n in rows[0][0] if len({str(values.get(n)) for values, _ in rows}) > 1]
    dimensions = [_dimension(name, [values for values, _ in rows]) for name in names]
    speeds = [speed for _, speed in rows]
    dimensions.append({"label": f"tok/s at {concurrency}", "values": speeds})
    figure = go.Figure(
        go.Parcoords(
            line={
                "color": speeds,
                "colorscale": "Viridis",
                "showscale": True,
                "colorbar": {"title": {"text": "tok/s"}},
            },
            dimensions=dimensions,
            labelangle=-12,
        )
    )
    figure.update_layout(
        title={"text": "Knobs that vary, and the measured speed"},
        margin={"l": 80, "r": 60, "t": 120, "b": 40},
        template="plotly_white",
    )
    return figure


def _dimension(name: str, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers as they are; anything else as numbered categories."""
    values = [row.get(name) for row in rows]
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numeric:
        ticks = sorted({float(v) for v in values if v is not None})
        extra = {"tickvals": ticks} if len(ticks) <= 12 else {}
        return {"label": name, "values": values, **extra}
    texts = ["auto" if value is None else str(value) for value in values]
    kinds = sorted(set(texts))
    return {
        "label": name,
        "values": [kinds.index(text) for text in texts],
        "tickvals": list(range(len(kinds))),
        "ticktext": kinds,
    }


def _at(study: StudyEvidence, concurrency: int) -> list[tuple[TrialEvidence, LevelEvidence]]:
    return [
        (trial, level)
        for trial in study.trials
        for level in trial.levels
        if level.concurrency == concurrency
    ]


def _per_token(level: LevelEvidence, names: list[str]) -> float:
    emitted = level.accept_length or 1.0
    return sum(level.term_ms(name) or 0.0 for name in names) / emitted


def _tree(trial: TrialEvidence) -> str:
    knobs = trial.trial.knobs
    if knobs.method == "off":
        return "off"
    if knobs.topk == 1:
        return f"chain {knobs.steps}"
    return f"{knobs.steps}x{knobs.topk}/{knobs.draft_tokens}"


def _hover(trial: TrialEvidence) -> str:
    return f"trial {trial.trial.number} ({trial.trial.role})<br>{trial.trial.knobs.label()}"


def _bars(up: list[float], down: list[float]) -> dict[str, Any]:
    return {"array": up, "arrayminus": down, "thickness": 1, "width": 3}


def _axes(figure: go.Figure, title: str, x: str, y: str) -> None:
    figure.update_layout(
        title={"text": title},
        xaxis={"title": {"text": x}},
        yaxis={"title": {"text": y}},
        template="plotly_white",
        # above the plot: the dashboard's cards cut off what hangs below it
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 10}},
        margin={"l": 70, "r": 20, "t": 110, "b": 60},
    )


def _scale(figure: go.Figure, low: float, high: float, *, x_too: bool = False) -> None:
    """Show the medians: the interval of two repeats may be wider than all results together.

    Levels of concurrency lie far apart; a logarithmic axis keeps each readable.
    """
    logarithmic = high / low > _LOG_ABOVE
    shown = [math.log10(low), math.log10(high)] if logarithmic else [low, high]
    axis = {
        "range": shown,
        "type": "log" if logarithmic else "linear",
        # plotly's default labels a log axis with bare 2s and 5s
        "tickvals": _ticks(low, high) if logarithmic else None,
    }
    figure.update_yaxes(axis)
    if x_too:
        figure.update_xaxes(axis)


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]
