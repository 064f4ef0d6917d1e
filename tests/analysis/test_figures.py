"""Each figure shows the rows it was given: drawn values are read back from the axes."""

import known_rows as rows
import numpy as np
import pytest
import worlds
from matplotlib.figure import Figure

from analysis.ablations import ABLATIONS, IN_ONE_RUN, middle_budget
from analysis.figures import (
    ablation,
    allocation_map,
    bound_tightness,
    bounds_compared,
    budget_curve,
    drift,
    gallery,
    head_map,
    kept_tokens,
    kl_by_budget,
    layer_perturbation,
    leave_one_out,
    needle_map,
    optimum_gap,
    retained_mass,
    score_by_budget,
    score_by_perturbation,
    win_rate,
)
from analysis.figures.style import policy_colours
from analysis.statistics import proportion


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
    gallery(worlds.world(True), "a model")
    assert plt.get_fignums() == []


def test_every_picture_is_saved_twice_names_the_model_and_is_the_same_each_time(tmp_path):
    contents, tables = [], worlds.world(True)
    for attempt in ("first", "second"):
        folder = tmp_path / attempt
        folder.mkdir()
        for picture in gallery(tables, "a model <in 4 bits>"):
            picture.save(folder)
            assert isinstance(picture.figure, Figure)
            assert "a model &lt;in 4 bits&gt;" in (folder / f"{picture.name}.svg").read_text()
        contents.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert len(contents[0]) == 2 * (7 + len(IN_ONE_RUN) + 6)
    assert contents[0] == contents[1]


def test_figures_of_one_budget_take_the_one_nearest_to_the_papers():
    assert middle_budget([0.05, 0.1, 0.2, 0.4]) == 0.2
    assert middle_budget([0.1, 0.5]) == 0.1


def needle_rows():
    frame = rows.samples(lambda policy, budget, sample: float(policy == "full" or sample % 2))
    return frame.assign(
        depth=[(sample % 3) / 2 for sample in frame["sample"]], length=[512 + 512 * (sample > 4) for sample in frame["sample"]]
    )


def test_needle_map_holds_the_mean_score_of_each_depth_and_length():
    frame = needle_rows()
    ax = needle_map(frame, policy="snapkv", budget=0.2)
    drawn = np.asarray(ax.collections[0].get_array()).reshape(3, 2)
    chosen = frame[(frame["policy"] == "snapkv") & (frame["budget"] == 0.2)]
    for row, depth in enumerate((0, 0.5, 1)):
        for column, length in enumerate((512, 1024)):
            cell = chosen[(chosen["depth"] == depth) & (chosen["length"] == length)]
            assert drawn[row, column] == cell["score"].mean()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0 %", "50 %", "100 %"]
    assert ax.get_title() == "snapkv, 20 % cache: 50 %"
    with pytest.raises(ValueError, match="no row of h2o at 20 % has a depth"):
        needle_map(frame, policy="h2o", budget=0.2)


def test_score_by_budget_draws_means_with_their_intervals():
    frame = needle_rows()
    ax = score_by_budget(frame, task="vt")
    by = {container.get_label(): container for container in ax.containers}
    assert set(by) == {"snapkv", "fisher"}
    for policy, container in by.items():
        line, _, (bars,) = container
        np.testing.assert_allclose(np.asarray(line.get_ydata(), float), [0.5, 0.5])
        low, high = bars.get_segments()[0][:, 1]
        assert (low, high) == pytest.approx(proportion(5, 10)[1:]), policy
    assert ax.lines[0].get_ydata()[0] == 1
    assert [label.get_text() for label in ax.get_xticklabels()] == ["20 %", "40 %"]
    with pytest.raises(ValueError, match="no row of the full cache for the task cwe"):
        score_by_budget(frame, task="cwe")


def test_score_by_perturbation_draws_a_point_for_each_task_policy_and_budget():
    frame = needle_rows()
    ax = score_by_perturbation(frame, by="kl")
    points = np.concatenate([np.asarray(part.get_offsets()) for part in ax.collections])
    np.testing.assert_allclose(points, [[1.0, -0.5]] * 4)
    assert ax.get_xscale() == "log"
    with pytest.raises(ValueError, match="'depth' is none of perturbation"):
        score_by_perturbation(frame, by="depth")
    with pytest.raises(ValueError, match="no evicted row has a value of theta"):
        score_by_perturbation(frame.assign(theta=np.nan), by="theta")


def test_a_policy_has_one_colour_in_every_figure():
    few, many = policy_colours(["snapkv", "fisher"]), policy_colours(["random", "fisher", "h2o", "snapkv", "tova", "full"])
    assert few.items() <= many.items()
    assert len(set(many.values())) == 6


def points(ax):
    """Offsets of all that was scattered, masked ones left out."""
    return np.concatenate([np.asarray(one.get_offsets()) for one in ax.collections if len(one.get_offsets())])


def test_an_ablation_shows_the_change_of_each_variant_against_the_first():
    ax = ablation(worlds.heads(True), ABLATIONS["alpha"])
    drawn = points(ax)
    assert len(drawn) == 7 * len(worlds.CONTEXTS)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:2] == ["α = 0", "α = 0.25"]
    np.testing.assert_allclose(drawn[np.round(drawn[:, 1]) == 0][:, 0], -10, atol=1e-9)
    np.testing.assert_allclose(drawn[np.round(drawn[:, 1]) == 1][:, 0], -20, atol=1e-9)
    assert ax.get_title() == "against attention-only, 20 % cache"


def test_a_single_variant_at_several_budgets_has_a_line_for_each():
    ax = ablation(worlds.heads(False), ABLATIONS["budget"])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["2.5 %", "5 %", "10 %", "20 %", "40 %", "80 %"]
    np.testing.assert_allclose(points(ax)[:, 0], 25, atol=1e-9)
    with pytest.raises(ValueError, match="no rows of the ablation 'length'"):
        ablation(rows.heads()[rows.heads()["policy"] == "none"], ABLATIONS["length"])


def test_budget_curve_and_kl_show_means_at_each_cache_size():
    ax = budget_curve(worlds.heads(True), queries="window")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["10 %", "20 %", "40 %"]
    lines = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 3]
    assert any(np.allclose(line[0] / line[2], 4) for line in lines)
    runs = worlds.runs(True)
    ax = kl_by_budget(runs)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["snapkv", "snapkv+two-stage", "fisher"]
    means = runs[runs["policy"] == "fisher"].groupby("budget")["kl"].mean().to_numpy()
    assert any(np.allclose(line.get_ydata(), means) for line in ax.lines if len(line.get_xdata()) == 3)


def test_both_bounds_lie_right_of_the_diagonal():
    single = worlds.single(True)
    ax = bounds_compared(single)
    drawn = points(ax)
    heads = len(worlds.CONTEXTS) * worlds.N_LAYERS * worlds.N_HEADS
    assert len(drawn) == 2 * heads
    assert (drawn[:, 0] >= drawn[:, 1]).all()
    assert "θ / L = 1.5, θ_ô / L = 1.1" in ax.get_title()


def test_optimum_gap_is_a_ratio_to_the_best():
    ax = optimum_gap(worlds.single(False), column="theta")
    assert ax.get_xlabel() == "θ / least θ"
    # θ of attention is 5 L, the certified bound half of 5 · 1.2 L
    assert any(np.allclose(line.get_xdata(), 5 / 3) for line in ax.lines)
    with pytest.raises(ValueError, match="least L found"):
        optimum_gap(worlds.single(True).query("choice == 'attention'"))


def test_leave_one_out_draws_each_entry_and_says_the_rank_correlation():
    entries = worlds.entries(True)
    ax = leave_one_out(entries)
    assert len(points(ax)) == len(entries)
    assert ax.get_title() == "rank correlation 1.000"


def test_an_allocation_map_holds_the_share_of_each_head():
    ax = allocation_map(worlds.allocation(), policy="fisher", bar=False)
    drawn = np.asarray(ax.collections[0].get_array()).reshape(worlds.N_LAYERS, 2)
    np.testing.assert_allclose(drawn, [[10 * (1 + layer + head) for head in range(2)] for layer in range(worlds.N_LAYERS)])
    with pytest.raises(ValueError, match="what h2o keeps"):
        allocation_map(worlds.allocation(), policy="h2o")


def test_kept_tokens_shows_each_token_on_the_shade_of_its_share():
    ax = kept_tokens(worlds.kept(), policy="fisher", first=1, count=24)
    assert [text.get_text() for text in ax.texts][:5] == ["word1", "word2", "word3", "word4", r"⏎\$x\$ <"]
    shades = [patch.get_facecolor()[:3] for patch in ax.patches]
    assert len(shades) == 24
    assert sum(shades[0]) > sum(shades[9])  # share 0.1 is lighter than 1
    with pytest.raises(ValueError, match="from 500 on"):
        kept_tokens(worlds.kept(), policy="fisher", first=500)
