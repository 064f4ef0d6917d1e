"""Exact leave-one-out over layers: equal to removals one at a time, and a run that was stopped goes on."""

import pytest
import torch
from models import prompt, tiny

from perturbation.leave_one_out import leave_one_out
from perturbation.removal import Removals


def removals(dtype=torch.float64, seed=0, queries=2) -> Removals:
    tokens = prompt(11, seed=seed)
    return Removals.of(tiny("llama", dtype=dtype), tokens[:, :-queries], tokens[:, -queries:])


def alone(of: Removals, layer: int, head: int, entry: int) -> torch.Tensor:
    keep = torch.ones(1, 2, of.entries, dtype=torch.bool)
    keep[0, head, entry] = False
    return of.without({layer: keep}).kl[0]


@torch.no_grad()
def test_every_entry_of_every_head_has_the_kl_of_its_own_removal():
    of, steps = removals(), []
    found = leave_one_out(of, [0, 2], batch=5, progress=lambda done, total: steps.append((done, total)))
    assert list(found) == [0, 2]
    for layer, kl in found.items():
        assert kl.shape == (2, 9, 2)
        for head in range(2):
            for entry in range(9):
                torch.testing.assert_close(kl[head, entry], alone(of, layer, head, entry), rtol=1e-5, atol=1e-13)
    assert steps[-1] == (36, 36)
    assert [done for done, _ in steps] == [5, 10, 15, 18, 23, 28, 33, 36]


@torch.no_grad()
def test_a_stopped_run_goes_on_and_computes_nothing_twice(tmp_path, monkeypatch):
    of, save, steps = removals(), tmp_path / "exact.safetensors", []
    whole = leave_one_out(of, batch=4)

    def stop(done, total):
        steps.append(done)
        if done == 22:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave_one_out(of, batch=4, save=save, progress=stop)
    ran = []
    original = Removals.without
    monkeypatch.setattr(
        Removals, "without", lambda self, keep: (ran.append(len(next(iter(keep.values())))), original(self, keep))[1]
    )
    again = leave_one_out(removals(), batch=4, save=save)
    assert steps[-1] == 22
    assert sum(ran) == 54 - 22
    for layer, kl in whole.items():
        torch.testing.assert_close(again[layer], kl, rtol=1e-6, atol=1e-14)
    ran.clear()
    part = leave_one_out(removals(), [1], save=save)
    assert not ran
    torch.testing.assert_close(part[1], whole[1], rtol=1e-6, atol=1e-14)
    assert [path.name for path in tmp_path.iterdir()] == ["exact.safetensors"]


@torch.no_grad()
def test_a_file_of_something_else_is_refused(tmp_path):
    save = tmp_path / "exact.safetensors"
    leave_one_out(removals(), [0], save=save)
    for other in (removals(seed=1), removals(dtype=torch.float32), removals(queries=3)):
        with pytest.raises(ValueError, match="another model, dtype or prompt"):
            leave_one_out(other, [0], save=save)
    of = removals()
    other = Removals(of.model, of.prompt.roll(1), of.following, of.full, of._past, of._outputs)  # the same logits, other tokens
    with pytest.raises(ValueError, match="prompt"):
        leave_one_out(other, [0], save=save)
    save.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no leave-one-out run"):
        leave_one_out(removals(), [0], save=save)
    with pytest.raises(ValueError, match=r"layers \[3\] do not exist: there are 3"):
        leave_one_out(removals(), [0, 3])
