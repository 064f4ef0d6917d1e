"""What leaves the decoder layers is what a capture says, in any arrangement of streams, and no hook is left."""

import pytest
import torch
from models import prompt, tiny

from hooks import capture
from hooks.hidden import handed_on, hidden_states
from hooks.tiny import tiny_model


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "jamba", "gemma3n_text"])
def test_hidden_states_are_those_of_a_capture_of_all_queries(family):
    model = tiny_model(family)
    with hidden_states(model) as found, capture(model, window=None) as captured:
        model(prompt(24))
    assert set(found) == {record.layer for record in captured}
    last = {record.layer: record.hidden_after for record in captured}
    for layer, hidden in found.items():
        assert torch.equal(hidden, last[layer])
        assert hidden.shape[:2] == (1, 24)


def test_streams_that_come_first_are_put_behind_the_queries():
    hidden = torch.arange(3 * 2 * 5 * 4.0).reshape(3, 2, 5, 4)
    assert torch.equal(handed_on(hidden, (2, 5)), hidden.permute(1, 2, 0, 3))
    assert torch.equal(handed_on((hidden, None), (2, 5)), hidden.permute(1, 2, 0, 3))
    assert handed_on(hidden, (3, 2)) is hidden  # streams behind the queries already
    assert handed_on(hidden, None) is hidden


def test_no_hook_is_left_after_an_exception():
    model = tiny("llama")

    def hooks():
        return [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]

    before = hooks()
    inside = []

    def failing():
        with hidden_states(model):
            inside.append(hooks())
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert inside[0] != before
    assert hooks() == before
