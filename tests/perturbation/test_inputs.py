"""Bad input is refused with its value or shape, in `perturbation` and in `bounds`; never answered."""

from itertools import product

import pytest
import torch
from jaxtyping import TypeCheckError

from bounds import (
    audit,
    audit_curve,
    bound_curve,
    constant,
    dinkelbach,
    minimal_theta_o_hat,
    over_heads,
    over_window,
    projected_distances,
    projected_norms,
    retained_mass,
    shifted,
    theta,
    theta_hat,
    theta_o,
    theta_o_hat,
)
from perturbation import budget_curve, evicted_weights, factors, perturbation, ranking, single_eviction_error
from perturbation.inputs import projection

WEIGHTS = torch.full((1, 2, 1, 4), 0.25)
VALUES = torch.ones(1, 1, 4, 3)
BLOCKS = torch.ones(2, 3, 5)
KEEP = torch.tensor([[[True, True, False, False]]])
NORMS = torch.ones(1, 2, 1, 4)
ORDER = torch.arange(4)[None, None]


def unchecked(function):
    """Past beartype, which would stop the wrong dtype first: what a user without it sees."""
    return getattr(function, "__wrapped__", function)


TAKE_WEIGHTS = {
    "perturbation": lambda weights, sink: perturbation(weights, VALUES, BLOCKS, KEEP, sink),
    "evicted_weights": lambda weights, sink: evicted_weights(weights, KEEP, sink),
    "factors": lambda weights, sink: factors(weights, VALUES, BLOCKS, KEEP, sink),
    "single_eviction_error": lambda weights, sink: single_eviction_error(weights, VALUES, BLOCKS, sink),
    "budget_curve": lambda weights, sink: budget_curve(weights, VALUES, ORDER, [2], sink),
    "retained_mass": lambda weights, sink: retained_mass(weights, KEEP, sink),
    "theta": lambda weights, sink: theta(weights, NORMS, KEEP, sink),
    "theta_hat": lambda weights, sink: theta_hat(weights, NORMS, KEEP, KEEP, sink),
    "theta_o": lambda weights, sink: theta_o(weights, VALUES, BLOCKS, KEEP, sink),
    "theta_o_hat": lambda weights, sink: theta_o_hat(weights, VALUES, BLOCKS, KEEP, sink),
    "shifted": lambda weights, sink: shifted(weights, VALUES, BLOCKS, KEEP, torch.zeros(1, 2, 1, 3), sink),
    "bound_curve": lambda weights, sink: bound_curve(weights, NORMS, ORDER, [2], sink),
    "dinkelbach": lambda weights, sink: dinkelbach(
        weights[:, :, 0], NORMS[:, :, 0], 2, None if sink is None else sink[:, :, 0]
    ),
}


@pytest.mark.parametrize("name", TAKE_WEIGHTS)
def test_weights_that_are_no_probabilities_are_refused_with_the_value(name):
    judge = TAKE_WEIGHTS[name]
    judge(WEIGHTS, None)
    with pytest.raises(ValueError, match=r"-0\.25"):
        judge(torch.tensor([-0.25, 0.5, 0.5, 0.25]).expand(1, 2, 1, 4), None)
    with pytest.raises(ValueError, match=r"0\.2|1\.2"):
        judge(WEIGHTS * 1.2, None)
    with pytest.raises(ValueError, match="sum"):
        judge(WEIGHTS, torch.full((1, 2, 1), 0.1))
    with pytest.raises(ValueError, match=r"sum|nan"):
        judge(WEIGHTS * torch.nan, None)
    with pytest.raises(ValueError, match=r"-0\.2"):
        judge(WEIGHTS * 1.2, torch.full((1, 2, 1), -0.2))


@pytest.mark.parametrize(
    "function", [lambda keep: perturbation(WEIGHTS, VALUES, BLOCKS, keep), lambda keep: theta(WEIGHTS, NORMS, keep)]
)
def test_a_mask_that_keeps_nothing_is_refused_unless_there_is_a_sink(function):
    with pytest.raises(ValueError, match="keep at least one"):
        function(torch.zeros(1, 1, 4, dtype=torch.bool))


def test_with_a_sink_nothing_need_be_kept():
    sink, nothing = torch.full((1, 2, 1), 0.2), torch.zeros(1, 1, 4, dtype=torch.bool)
    # o = 0.8 v, ô = 0
    torch.testing.assert_close(perturbation(WEIGHTS * 0.8, VALUES, BLOCKS, nothing, sink), torch.full((1, 2, 1), 0.8 * 15))
    torch.testing.assert_close(theta(WEIGHTS * 0.8, NORMS * 15, nothing, sink), torch.full((1, 2, 1), 0.8 * 15))


@pytest.mark.parametrize("mask", [KEEP.int(), KEEP.float()])
def test_a_mask_that_is_not_boolean_is_refused_with_its_dtype(mask):
    from bounds.inputs import evicted
    from perturbation.inputs import per_head

    for check in (per_head, evicted):
        with pytest.raises(ValueError, match=f"boolean.*{mask.dtype}"):
            unchecked(check)(mask, WEIGHTS, None)


def test_shapes_that_do_not_fit_are_refused_with_both():
    with pytest.raises(ValueError, match=r"keep \[1 KV heads, 3 keys\] does not fit weights \[2 heads, 4 keys\]"):
        unchecked(evicted_weights)(WEIGHTS, KEEP[..., :3])
    with pytest.raises(ValueError, match=r"\(1, 1, 3\).*\(1, 2, 1, 4\)"):
        unchecked(theta)(WEIGHTS, NORMS, KEEP[..., :3])
    with pytest.raises(ValueError, match=r"values \[3 KV heads, 4 keys\] do not fit weights \[2 heads"):
        unchecked(single_eviction_error)(WEIGHTS, VALUES.expand(1, 3, 4, 3), BLOCKS)
    with pytest.raises(ValueError, match=r"W_O \(3, 3, 5\) does not fit 2 heads"):
        projection(torch.ones(3, 3, 5), VALUES, 2)
    with pytest.raises(ValueError, match=r"value_norms \(1, 2, 3, 4\)"):
        unchecked(theta)(WEIGHTS, NORMS.expand(1, 2, 3, 4), KEEP)
    with pytest.raises(ValueError, match=r"reference \(1, 1, 1, 3\)"):
        unchecked(projected_distances)(VALUES, BLOCKS, torch.zeros(1, 1, 1, 3))


def test_values_and_norms_that_are_not_finite_are_refused_with_their_number():
    broken = VALUES.clone()
    broken[0, 0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="1 of 12 values"):
        perturbation(WEIGHTS, broken, BLOCKS, KEEP)
    with pytest.raises(ValueError, match="1 of 30 entries of W_O"):
        perturbation(WEIGHTS, VALUES, BLOCKS.clone().index_put((torch.tensor(0),) * 3, torch.tensor(torch.nan)), KEEP)
    with pytest.raises(ValueError, match="1 of 12 values"):
        projected_norms(broken, BLOCKS)
    with pytest.raises(ValueError, match="finite and not negative"):
        theta(WEIGHTS, -NORMS, KEEP)


def test_rankings_and_budgets_out_of_range_are_refused():
    for curve in (
        lambda order, budgets: budget_curve(WEIGHTS, VALUES, order, budgets),
        lambda order, budgets: bound_curve(WEIGHTS, NORMS, order, budgets),
    ):
        for budgets in ([], [0], [5], [1, 9]):
            with pytest.raises(ValueError, match="budgets"):
                curve(ORDER, budgets)
        with pytest.raises(ValueError, match=r"order"):
            curve(torch.tensor([[[0, 1, 1, 3]]]), [2])
    with pytest.raises(ValueError, match="1 of 4 scores are NaN"):
        ranking(torch.tensor([[[0.0, torch.nan, 1.0, 2.0]]]))


def test_stage_1_outside_of_what_is_kept_is_refused_with_the_count():
    with pytest.raises(ValueError, match="2 of its entries"):
        theta_hat(WEIGHTS, NORMS, KEEP, ~KEEP)


def test_a_norm_below_1_is_refused():
    for judge in (
        lambda: perturbation(WEIGHTS, VALUES, BLOCKS, KEEP, norm=0.5),
        lambda: factors(WEIGHTS, VALUES, BLOCKS, KEEP, norm=0.5),
        lambda: single_eviction_error(WEIGHTS, VALUES, BLOCKS, norm=0.5),
        lambda: projected_norms(VALUES, BLOCKS, norm=0.5),
        lambda: theta_o_hat(WEIGHTS, VALUES, BLOCKS, KEEP, norm=0.5),
    ):
        with pytest.raises(ValueError, match=r"not 0\.5"):
            judge()


def test_words_that_mean_nothing_are_refused():
    bound = torch.ones(1, 2, 1)
    for judge in (
        lambda: unchecked(perturbation)(WEIGHTS, VALUES, BLOCKS, KEEP, level="heads"),
        lambda: unchecked(single_eviction_error)(WEIGHTS, VALUES, BLOCKS, level="model"),
        lambda: unchecked(over_heads)(bound, 1, "grp"),
        lambda: unchecked(over_window)(bound, "average"),
    ):
        with pytest.raises((ValueError, TypeCheckError), match=r"heads|model|grp|average"):
            judge()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_gate_a_reference_or_w_o_that_is_not_finite_is_refused(broken):
    gate = torch.full((1, 2, 1, 3), broken)
    blocks = BLOCKS * broken
    for judge in (
        lambda: perturbation(WEIGHTS, VALUES, BLOCKS, KEEP, gate=gate),
        lambda: single_eviction_error(WEIGHTS, VALUES, BLOCKS, gate=gate),
        lambda: theta_o_hat(WEIGHTS, VALUES, BLOCKS, KEEP, gate=gate),
        lambda: projected_norms(VALUES, BLOCKS, gate=gate),
        lambda: shifted(WEIGHTS, VALUES, BLOCKS, KEEP, gate),
        lambda: perturbation(WEIGHTS, VALUES, blocks, KEEP),
        lambda: projected_norms(VALUES, blocks),
        lambda: theta_o_hat(WEIGHTS, VALUES, blocks, KEEP),
        lambda: minimal_theta_o_hat(WEIGHTS, VALUES, blocks, 2),
        lambda: constant(WEIGHTS, NORMS * broken),
    ):
        with pytest.raises(ValueError, match="finite"):
            judge()


@pytest.mark.parametrize("dtypes", list(product([torch.float32, torch.float64], repeat=3)))
def test_every_mixture_of_precisions_is_taken(dtypes):
    weights, values, blocks = (tensor.to(dtype) for tensor, dtype in zip((WEIGHTS * 0.5, VALUES, BLOCKS), dtypes, strict=True))
    for sink in (torch.full((1, 2, 1), 0.5), torch.full((1, 2, 1), 0.5).double()):
        point = torch.zeros(1, 2, 1, 3)
        audited = audit(weights, values, blocks, KEEP, sink, centred=True)
        assert audited.violations == 0
        assert audit_curve(weights, values, blocks, ORDER, [1, 3], sink).violations == 0
        single_eviction_error(weights, values, blocks, sink, gate=point.double() + 1)
        factors(weights, values, blocks, KEEP, sink)
        theta_o(weights, values, blocks, KEEP, sink)
        shifted(weights, values, blocks, KEEP, point, sink, gate=point.double())
