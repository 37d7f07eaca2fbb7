"""Runs one task of `flotilla-bench engine` with PyTorch, transformers and PEFT.

Usage: pytorch_tasks.py MODEL TASK THREADS TEXT; prints {"tokens_per_s": …}.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

PROMPT, NEW, PREFILL, CONTEXT, CHUNKS = 64, 32, 512, 512, 8
BATCH, LENGTH, STEPS = 2, 256, 3


def token_rows(count, length):
    """Returns token ids 0 to 255, repeated: the same input as for the other engines."""
    return torch.arange(count * length).remainder(256).reshape(count, length)


@torch.inference_mode()
def prefill(model):
    tokens = token_rows(1, PREFILL)
    model(tokens[:, :8], logits_to_keep=1)
    began = time.perf_counter()
    model(tokens, logits_to_keep=1)
    return PREFILL / (time.perf_counter() - began)


@torch.inference_mode()
def decode(model, sequences):
    out = model(token_rows(sequences, PROMPT), use_cache=True, logits_to_keep=1)
    began = time.perf_counter()
    for _ in range(NEW):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
    return sequences * NEW / (time.perf_counter() - began)


@torch.inference_mode()
def perplexity(model, text):
    tokens = torch.frombuffer(bytearray(open(text, "rb").read()), dtype=torch.uint8).long()
    nll = 0.0
    for chunk in range(CHUNKS):
        window = tokens[chunk * CONTEXT:(chunk + 1) * CONTEXT].unsqueeze(0)
        half = CONTEXT // 2
        logits = model(window, logits_to_keep=half).logits[0, :-1].float()
        nll += torch.nn.functional.cross_entropy(logits, window[0, half + 1:], reduction="sum").item()
    return nll


def train(model, checkpointing):
    from peft import LoraConfig, get_peft_model

    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=modules))
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens = token_rows(BATCH, LENGTH)
    labels = tokens.clone()
    labels[:, :LENGTH // 2] = -100
    began = None
    for step in range(STEPS + 1):
        if step == 1:
            began = time.perf_counter()
        model(tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return STEPS * BATCH * LENGTH / (time.perf_counter() - began)


def main():
    path, task, threads, text = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    if task == "prefill":
        speed = prefill(model)
    elif task.startswith("decode-"):
        speed = decode(model, int(task.removeprefix("decode-")))
    elif task == "perplexity":
        # The caller measures the time of the whole process.
        perplexity(model, text)
        speed = 0.0
    else:
        speed = train(model, task == "train-recompute")
    print(json.dumps({"tokens_per_s": speed}))


if __name__ == "__main__":
    main()
