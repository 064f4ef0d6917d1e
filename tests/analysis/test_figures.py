"""Each figure shows the rows it was given: drawn values are read back from the axes."""

import known_rows as rows
import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis.figures import bound_tightness, drift, gallery, head_map, layer_perturbation, retained_mass, win_rate
from analysis.figures.gallery import middle_budget


def test_head_map_holds_the_mean_change_of_each_head():
    ax = head_map(rows.heads(), budget=0.2, bar=False)
    drawn = np.asarray(ax.collections[0].get_array()).reshape(2, 2)
    np.testing.assert_allclose(drawn, [[-50, 25], [-50, 25]])
    assert "50 % of heads" in ax.get_title()


def test_layer_perturbation_draws_both_selections():
    ax = layer_perturbation(rows.layers(), budget=0.2, queries="window")
    lines = {tuple(np.round(line.get_ydata(), 6)) for line in ax.lines if len(line.get_xdata()) == 2}
    assert {(4.0, 8.0), (3.5, 7.0)} <= lines


def test_win_rate_is_in_percent_by_layer_and_budget():
    ax = win_rate(rows.heads())
    assert sum(list(line.get_ydata()) == [50, 50] and list(line.get_xdata()) == [0, 1] for line in ax.lines) >= 2


def test_bound_tightness_draws_a_point_per_head_below_the_diagonal():
    ax = bound_tightness(rows.heads(), budget=0.1)
    points = np.asarray(ax.collections[0].get_offsets())
    assert points.shape == (16, 2)
    np.testing.assert_allclose(points[:, 0], 4 * points[:, 1])
    assert "θ / L = 4.0" in ax.get_title()


def test_retained_mass_shows_stage_1_apart_from_everything_kept():
    ax = retained_mass(rows.heads(), queries="later")
    assert ax.get_ylim() == pytest.approx((0, 1.02))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "two-stage, after stage 1",
        "two-stage, all kept",
        "attention-only, all kept",
    ]


def test_drift_begins_at_zero_and_shows_every_line_whole():
    ax = drift(rows.layers(), budget=0.2)
    low, high = ax.get_ylim()
    assert low == 0
    assert high >= 0.02


def test_figures_touch_no_global_state():
    import matplotlib.pyplot as plt

    win_rate(rows.heads())
    gallery(rows.heads(), rows.layers(), "a model")
    assert plt.get_fignums() == []


def test_every_picture_is_saved_twice_names_the_model_and_is_the_same_each_time(tmp_path):
    contents = []
    for attempt in ("first", "second"):
        folder = tmp_path / attempt
        folder.mkdir()
        for picture in gallery(rows.heads(), rows.layers(), "a model <in 4 bits>"):
            picture.save(folder)
            assert isinstance(picture.figure, Figure)
            assert "a model &lt;in 4 bits&gt;" in (folder / f"{picture.name}.svg").read_text()
        contents.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert len(contents[0]) == 12
    assert contents[0] == contents[1]


def test_figures_of_one_budget_take_the_one_nearest_to_the_papers():
    assert middle_budget([0.05, 0.1, 0.2, 0.4]) == 0.2
    assert middle_budget([0.1, 0.5]) == 0.1
