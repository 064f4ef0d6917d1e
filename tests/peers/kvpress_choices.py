"""What kvpress keeps, run in its own environment: `python kvpress_choices.py FOLDER` reads cases.json there and writes choices.json.

FOLDER holds a Llama as `save_pretrained` writes it, and cases: tokens, compression ratio, window, kernel, α and ε, or no α for SnapKV.
"""

import json
import sys
from pathlib import Path

import torch
from kvpress import CriticalKVPress, SnapKVPress
from kvpress.utils import compute_n_kept
from transformers import AutoModelForCausalLM


def choices(model, case):
    """The kept positions of each layer and KV head."""
    press = SnapKVPress(case["ratio"], case["window"], case["kernel"])
    if case["alpha"] is not None:
        press = CriticalKVPress(press, case["epsilon"], case["alpha"])
    kept, score = [], press.score

    def scored(module, hidden_states, keys, *rest):
        scores = score(module, hidden_states, keys, *rest)
        count = compute_n_kept(keys.shape[2], case["ratio"])  # as ScorerPress.compress chooses
        kept.append(scores.topk(count, dim=-1).indices.sort(-1).values[0].tolist())
        return scores

    press.score = scored
    with torch.no_grad(), press(model):
        model(torch.tensor([case["tokens"]]))
    return kept


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    llama = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    found = [choices(llama, case) for case in json.loads((folder / "cases.json").read_text())]
    (folder / "choices.json").write_text(json.dumps(found))
