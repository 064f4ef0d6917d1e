"""On the real model, every head: the chain of bounds, σ ≤ ½ included, and the gap of a greedy choice."""

from pydoc_data.topics import topics

import pytest
import torch

from bounds import audit, audit_curve, gap, projected_norms
from hooks import capture
from perturbation import attention_weights, ranking

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def captured(reference):
    tokens = reference.tokenizer(topics["typesseq"], return_tensors="pt").input_ids[:, :512]
    with torch.inference_mode(), capture(reference.model, window=8) as found:
        reference.model(tokens, logits_to_keep=1)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("norm", [1, 2])
def test_every_link_of_the_chain_holds_on_every_head_below_one_half_too(captured, norm):
    """L ≤ θ_ô ≤ Σ_E A ‖ν‖ + (1 − σ) ‖ô‖ ≤ θ at 1, 5 and 20 % cache, by attention and at random."""
    low = high = 0
    for record in captured:
        weights, sink_mass = attention_weights(**record.inputs)
        mean = weights.mean(2).unflatten(1, (record.n_kv_heads, -1)).mean(2)
        scores = torch.stack([mean, torch.rand(mean.shape, generator=torch.Generator().manual_seed(record.layer))])
        order = ranking(scores)
        for budget in (5, 25, 102):
            keep = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., :budget], True)
            found = audit(
                weights[None], record.values[None], record.projection_blocks, keep, sink_mass[None], norm=norm, centred=True
            )
            assert found.violations == 0
            # far above rounding on real heads, and so without the allowance as well
            moved = found.perturbation > 1e-3 * found.theta
            assert (found.perturbation[moved] <= found.theta_o_hat[moved] * (1 + 1e-5)).all()
            assert (found.theta_o_hat[moved] <= found.origin[moved] * (1 + 1e-5)).all()
            assert (found.origin[moved] <= found.theta[moved] * (1 + 1e-5)).all()
            low += int((~found.condition).sum())
            high += int(found.condition.sum())
    assert low > 1000
    assert high > 1000


@torch.inference_mode()
def test_a_curve_of_twenty_budgets_breaks_no_bound_on_any_head(captured):
    for record in captured:
        weights, sink_mass = attention_weights(**record.inputs)
        mean = weights.mean(2).unflatten(1, (record.n_kv_heads, -1)).mean(2)
        budgets = [25 * (number + 1) for number in range(20)]
        found = audit_curve(weights, record.values, record.projection_blocks, ranking(mean), budgets, sink_mass)
        assert found.violations == 0
        assert found.perturbation.shape == (20, 1, 9, 8)


@torch.inference_mode()
def test_greedy_is_at_a_measured_distance_from_the_best_choice_in_theta_and_in_truth(captured):
    """The first 16 entries of a head, renormalised, so that all 1,820 choices of 4 can be tried."""
    for record in captured[7], captured[20]:
        weights, _ = attention_weights(**record.inputs)
        few = weights[:, :, -1:, :16].double()
        few = few / few.sum(-1, keepdim=True)
        values = record.values[:, :, :16].double().repeat_interleave(record.group, 1)
        blocks = record.projection_blocks.double()
        norms = projected_norms(values, blocks)
        for scores in (few[:, :, 0], (few * norms)[:, :, 0]):
            keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ranking(scores)[..., :4], True)
            found = gap(few, values, blocks, keep)
            assert found.theta_proved.all()
            assert found.perturbation_proved.all()
            assert (found.in_theta >= 1).all()
            assert (found.in_truth >= found.in_truth.new_ones(())).all()
            assert (found.perturbation_optimum <= found.theta_optimum).all()
