"""Figures: plain functions from curves to plotly. The page's script appends points to what is drawn here, by the order of the traces."""

import json
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from gradio.components.plot import PlotData
from plotly.subplots import make_subplots

from minigpt.config import TransformerConfig
from minigpt.history import History, Series
from minigpt.optim import get_lr

Curve = tuple[list[int], list[float | None]]
Curves = Mapping[str, Curve]
EMPTY: Curve = ([], [])

GREY, BLUE, ORANGE, GOLD, RED = "rgba(128,128,128,.55)", "#3b82f6", "#f97316", "#eab308", "#ef4444"
OVERLAYS = ("#0d9488", "#a855f7", "#db2777", "#65a30d")
GRID = "rgba(128,128,128,.22)"
LOSS_AXES = {"xaxis": {"title": "step", "rangemode": "tozero"}, "yaxis": {"title": "loss (nats per token)"}}
MODE_BAR = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]}


def curves_of(history: History) -> dict[str, Curve]:
    """Return the drawn points of a run's history."""
    return {name: (part["x"], part["y"]) for name, part in history.since({}).items()}


def thin(curves: Curves, most: int) -> dict[str, Curve]:
    """Keep at most `most` points of each curve, extremes and gaps among them, its last one always."""
    return {name: curve if len(curve[0]) <= most else _thinned(curve, most) for name, curve in curves.items()}


def _thinned(curve: Curve, most: int) -> Curve:
    *points, (last_x, last_y) = zip(*curve, strict=True)
    series = Series(most - 5)  # of which a flush adds up to four
    for point in points:
        series.add(*point)
    series.flush()
    return [*series.x, last_x], [*series.y, last_y]


def loss_figure(curves: Curves, baselines: Mapping[str, float | None], best: tuple[int, float] | None = None, last_step: int = 1) -> go.Figure:
    """Draw train, smoothed and validation loss on one axis, a star at the best, dashed lines at what needs no learning.

    Args:
        curves: by the names of `History.series`.
        baselines: `uniform` (ln V) and `unigram` losses in nats; None draws nothing.
        best: step and loss of the best validation.
        last_step: where the dashed lines end.
    """
    star: Curve = ([best[0]], [best[1]]) if best else EMPTY
    figure = go.Figure(
        [
            line(curves.get("train", EMPTY), "training", GREY, width=1),
            line(curves.get("smoothed", EMPTY), "training, smoothed", BLUE, width=2.5),
            line(curves.get("val", EMPTY), "validation", ORANGE, width=2, mode="lines+markers", marker={"size": 5}),
            line(
                star, "best", GOLD, mode="markers", cliponaxis=False, marker={"symbol": "star", "size": 15, "line": {"width": 1, "color": "#713f12"}}
            ),
            _dashed(baselines.get("uniform"), last_step, "knows nothing"),
            _dashed(baselines.get("unigram"), last_step, "knows frequencies"),
            line(EMPTY, "not a number", RED, mode="markers", marker={"symbol": "x", "size": 12}),
        ]
    )
    return dressed(figure, 320).update_layout(LOSS_AXES)


def overlay(curves: Curves, name: str, colour: str) -> list[dict[str, Any]]:
    """Return a run's validation and, dimmer, its smoothed training loss as traces to lay over another run's chart."""
    val = line(curves.get("val", EMPTY), name, colour)
    train = line(curves.get("smoothed", EMPTY), f"{name}, training", colour, width=1.2, opacity=0.5, showlegend=False)
    traces: list[dict[str, Any]] = json.loads(go.Figure([val, train]).to_json())["data"]
    return traces


def line(curve: Curve, name: str, colour: str, *, width: float = 2, mode: str = "lines", **more: Any) -> go.Scatter:
    """Draw one curve, told by its name where the pointer is."""
    hover = "step %{x:,}<br>" + name + " %{y:.4g}<extra></extra>"
    return go.Scatter(x=curve[0], y=curve[1], name=name, mode=mode, line={"color": colour, "width": width}, hovertemplate=hover, **more)


def _dashed(value: float | None, last_step: int, name: str) -> go.Scatter:
    curve: Curve = EMPTY if value is None else ([0, last_step], [value, value])
    scatter = line(curve, name, GREY, width=1.5)
    scatter.line.dash = "dash" if name == "knows nothing" else "dot"
    return scatter


def details_figure(curves: Curves) -> go.Figure:
    """Draw learning rate, gradient norm and tokens per second below each other, on one axis of steps."""
    names = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_s": "tokens per second"}
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for row, (name, title) in enumerate(names.items(), start=1):
        figure.add_trace(line(curves.get(name, EMPTY), title, (BLUE, ORANGE, "#10b981")[row - 1]), row=row, col=1)
        figure.update_yaxes(title=title, row=row, col=1)
    figure.update_xaxes(title="step", row=3, col=1)
    return dressed(figure, 480).update_layout(showlegend=False)


def schedule_figure(config: TransformerConfig, done: int = 0, had: Curve = EMPTY) -> go.Figure:
    """Draw the learning rate that these settings plan for every step.

    Args:
        config: the settings.
        done: the steps that a run has behind it, where a line says that it would go on.
        had: the rates that it had until then, drawn in the place of what these settings would have planned.
    """
    steps = sorted({*range(0, config.max_steps, max(config.max_steps // 200, 1)), min(config.warmup_steps, config.max_steps), done, config.max_steps})
    plan = [(step, float(get_lr(step, config.warmup_steps, config.max_steps, config.learning_rate, config.min_lr))) for step in steps]
    past = [(step, rate) for step, rate in zip(*had, strict=True) if step <= done]
    points = [*past, *(point for point in plan if not past or point[0] >= done)]
    figure = go.Figure([line(([step for step, _ in points], [rate for _, rate in points]), "learning rate", BLUE)])
    if done:
        figure.add_vline(done, line={"color": ORANGE, "dash": "dot"}, annotation_text="goes on here")
    return dressed(figure, 220).update_layout(showlegend=False, xaxis_title="step", yaxis_title="learning rate")


def dressed(figure: go.Figure, height: int) -> go.Figure:
    """Make a figure fit light and dark pages: nothing painted behind it, grey lines, colours that read on both; the script sets the font's."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 52, "r": 12, "t": 8, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#888", "family": "system-ui, sans-serif", "size": 12},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"namelength": -1},
        dragmode="zoom",
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True)
    return figure


def as_plot(figure: go.Figure) -> PlotData:
    """Wrap a figure with the mode bar's settings, which gr.Plot passes on to plotly only in this form."""
    return PlotData(type="plotly", plot=json.dumps({**json.loads(figure.to_json()), "config": MODE_BAR}))
