from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from mismatch_probe.entry import main
from mismatch_probe.folder import Analysis, open_analysis
from mismatch_probe.reporters.plot_style import RED
from mismatch_probe.reporters.plots import FIGURES, plot_decomposition, plot_ess, plot_prefix_kl
from tests.planted import Planted


def opened(planted: Planted) -> Analysis:
    return open_analysis(planted.path, None)


def shaded_steps(figure: Figure, panel: int = 0) -> list[float]:
    from matplotlib.colors import to_rgb

    spans = [p for p in figure.axes[panel].patches if isinstance(p, Rectangle) and p.get_facecolor()[:3] == to_rgb(RED)]
    return sorted(span.get_x() + 0.5 for span in spans)


@pytest.mark.parametrize("format", ["png", "svg"])
def test_every_figure_is_written_and_the_same_twice(planted: Planted, format: str) -> None:
    assert main(["plot", str(planted.path), "--format", format, "-q"]) == 0
    folder = planted.path / "mismatch_probe" / "plots"
    first = {name: (folder / f"{name}.{format}").read_bytes() for name in FIGURES}
    assert main(["plot", str(planted.path), "--format", format, "-q"]) == 0
    assert {name: (folder / f"{name}.{format}").read_bytes() for name in FIGURES} == first
    if format == "png":
        for name in FIGURES:
            picture = imread(folder / f"{name}.png")
            assert picture.shape[1] >= 1200 and 0.01 < (picture[..., :3] < 0.9).any(axis=-1).mean() < 0.5


@pytest.mark.parametrize("name", FIGURES)
def test_every_breakdown_step_is_marked(planted: Planted, name: str) -> None:
    analysis = opened(planted)
    threshold = 0.7
    broken = analysis.steps.loc[analysis.steps["ess_lag_sequence_ci_high"] < threshold, "step"].tolist()
    assert 0 < len(broken) < len(analysis.steps)
    figure = FIGURES[name](analysis, "sequence", threshold)
    assert shaded_steps(figure) == pytest.approx(broken)
    assert shaded_steps(FIGURES[name](analysis, "sequence", 0.0)) == []


def test_lines_are_the_table(planted: Planted) -> None:
    analysis = opened(planted)
    figure = plot_ess(analysis, "sequence", 0.5)
    for panel, ratio in zip(figure.axes, ("lag", "discrepancy", "total"), strict=True):
        drawn = [line.get_ydata() for line in panel.get_lines()[:3]]
        for level, values in zip(("token", "sequence", "prompt"), drawn, strict=True):
            assert np.array_equal(values, analysis.steps[f"ess_{ratio}_{level}"])
        assert sum(isinstance(c, PolyCollection) for c in panel.collections) == 3  # a band each


def test_zero_has_no_place_on_a_logarithmic_axis_and_is_said(planted: Planted) -> None:
    axes = plot_prefix_kl(opened(planted), "sequence", 0.5).axes[0]
    wide = opened(planted)
    wide.steps.loc[1, "prefix_kl_stale_trainer"] = 1e-6
    axes = plot_prefix_kl(wide, "sequence", 0.5).axes[0]
    assert axes.get_yscale() == "log"
    assert math.isnan(axes.get_lines()[0].get_ydata()[0])
    assert any("zero at step 0" in text.get_text() for text in axes.texts)


def test_labels_at_the_ends_do_not_overlap(planted: Planted) -> None:
    analysis = opened(planted)
    steps = analysis.steps
    steps["prefix_kl_trainer_stale"] = steps["prefix_kl_stale_trainer"]
    figure = plot_prefix_kl(analysis, "sequence", 0.5)
    offsets = [text.xyann[1] for text in figure.axes[0].texts if "KL" in text.get_text()]
    assert abs(offsets[0] - offsets[1]) >= 10


def test_without_a_split_the_total_is_drawn(planted: Planted) -> None:
    analysis = opened(planted)
    for part in ("discrepancy", "lag"):
        for column in [c for c in analysis.steps if c.startswith(part)]:
            analysis.steps[column] = np.nan
    figure = plot_decomposition(analysis, "sequence", 0.5)
    assert [text.get_text() for text in figure.axes[0].texts if "total" in text.get_text()]


def test_null_tables_draw_nothing(planted: Planted, tmp_path: Path) -> None:
    analysis = opened(planted)
    analysis.steps.loc[:, [c for c in analysis.steps if "ess" in c or "kl" in c or "rms" in c]] = np.nan
    assert all(figure(analysis, "sequence", 0.5) is None for figure in (plot_decomposition, plot_ess, plot_prefix_kl))


def test_only_and_its_mistakes(planted: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(planted.path), "--only", "ess"]) == 0
    assert capsys.readouterr().err.count("wrote") == 1
    assert main(["plot", str(planted.path), "--only", "es"]) == 2
    assert "did you mean ess?" in capsys.readouterr().err
