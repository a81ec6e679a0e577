"""Figures of what is inside a file: parameters by block, the values of a tensor, two runs on one axis. Names are a stranger's: shown as text."""

import html
from collections.abc import Mapping

import plotly.graph_objects as go

from minigpt.header import clean
from minigpt.inspection.statistics import BINS, TensorStatistics
from minigpt.ui import charts

COLOURS = (charts.BLUE, charts.ORANGE)


def _text(name: str) -> str:
    """Make a name safe for plotly, which takes some tags in its texts for markup."""
    return html.escape(clean(name, 40))


def blocks_figure(parameters: Mapping[str, int]) -> go.Figure:
    """Draw the parameters by block as areas."""
    labels, counts = [_text(name) for name in parameters], list(parameters.values())
    hover = "%{label}: %{value:,} parameters<extra></extra>"
    treemap = go.Treemap(labels=labels, parents=[""] * len(labels), values=counts, textinfo="label+percent root", hovertemplate=hover)
    return charts.dressed(go.Figure([treemap]), 260).update_layout(margin={"l": 0, "r": 0, "t": 0, "b": 0}, treemapcolorway=[charts.BLUE])


def histogram_figure(found: TensorStatistics) -> go.Figure:
    """Draw how often values occur."""
    low, high = found.minimum or 0.0, found.maximum or 0.0
    step = (high - low or 1.0) / BINS
    first = low if high > low else low - 0.5  # all values are equal: numpy puts them into the middle of a range of 1
    middles = [first + step * (index + 0.5) for index in range(len(found.histogram))]
    hover = "%{y:,} values near %{x:.3g}<extra></extra>"
    figure = go.Figure([go.Bar(x=middles, y=found.histogram, width=step, marker={"color": charts.BLUE}, hovertemplate=hover)])
    return charts.dressed(figure, 280).update_layout(xaxis_title=f"values of {_text(found.name)}", yaxis_title="how many")


def picture_figure(found: TensorStatistics) -> go.Figure:
    """Draw the tensor as a picture, red above zero and blue below, as far as its largest block mean."""
    reach = max((abs(value) for row in found.picture for value in row if value is not None), default=0.0) or 1.0
    heat = go.Heatmap(z=found.picture, zmin=-reach, zmax=reach, colorscale="RdBu_r", hovertemplate="mean %{z:.3g}<extra></extra>")
    figure = charts.dressed(go.Figure([heat]), 280)
    figure.update_xaxes(title="columns, in at most 64 blocks", showticklabels=False)
    figure.update_yaxes(title="rows", showticklabels=False, autorange="reversed")
    return figure


def two_runs_figure(runs: Mapping[str, charts.Curves]) -> go.Figure:
    """Draw the smoothed training loss and the validation loss of two runs on one axis."""
    figure = go.Figure(
        [trace for colour, (name, curves) in zip(COLOURS, runs.items(), strict=False) for trace in charts.overlay(curves, _text(name), colour)]
    )
    return charts.dressed(figure, 320).update_layout(charts.LOSS_AXES, legend_title_text="validation (training is paler)", legend_title_side="top")
