#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "transformers>=5,<6"]
# ///
"""Scores completions with a reward model of transformers (AutoModelForSequenceClassification).

    argv: [/opt/reward_model.py, org/model, --sigmoid]

A model needs memory for each process: set `processes: 1`. The conversation is the prompt's
`messages`, or its `prompt` as a question, with the completion as the answer. Rewards of most models
have no bounds; `--sigmoid` maps them to 0 to 1.
"""
import argparse

from line_server import serve
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("model", help="directory, or name on the Hugging Face hub")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--max-tokens", type=int, default=4096, help="longer texts lose their start")
parser.add_argument("--sigmoid", action="store_true", help="rewards from 0 to 1")
parser.add_argument("--pass-at", type=float, default=0.5, help="least reward of a pass")
arguments = parser.parse_args()

# By default, transformers asks on stdin whether to run a model's own code.
settings = {"trust_remote_code": False}
tokenizer = AutoTokenizer.from_pretrained(arguments.model, truncation_side="left", **settings)
model = AutoModelForSequenceClassification.from_pretrained(arguments.model, **settings)
model = model.to(arguments.device).eval()
if model.config.num_labels != 1:
    raise SystemExit(f"{arguments.model} has {model.config.num_labels} outputs, not one reward")


def write_conversation(sample):
    question = sample.get("messages") or [
        {"role": "user", "content": sample.get("plain_prompt") or sample["prompt"]}
    ]
    messages = [*question, {"role": "assistant", "content": sample["completion"]}]
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    return "\n\n".join(message["content"] for message in messages)


def judge(sample):
    inputs = tokenizer(
        write_conversation(sample),
        truncation=True,
        max_length=arguments.max_tokens,
        add_special_tokens=not tokenizer.chat_template,
        return_tensors="pt",
    )
    with torch.inference_mode():
        reward = model(**inputs.to(arguments.device)).logits[0, 0].float()
    reward = (reward.sigmoid() if arguments.sigmoid else reward).item()
    return {"outcome": "pass" if reward >= arguments.pass_at else "fail", "reward": reward}


serve(judge)
