"""Loads a pushed merged model with transformers, and downloads the GGUF file of a branch.

    check_hub_forms.py REPOSITORY BRANCH FILE OUT

Prints what was found as JSON.
"""

import json
import sys

import torch
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM


def load_merged(repository):
    model, loading = AutoModelForCausalLM.from_pretrained(repository, output_loading_info=True)
    for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
        assert not loading[kind], (kind, loading[kind])
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all(), logits
    return type(model).__name__


def main():
    repository, branch, file, out = sys.argv[1:]
    path = hf_hub_download(repository, file, revision=branch, local_dir=out)
    with open(path, "rb") as gguf:
        magic = gguf.read(4)
    print(json.dumps({"model": load_merged(repository), "gguf": path, "magic": magic.decode()}))


if __name__ == "__main__":
    main()
