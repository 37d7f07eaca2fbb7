"""A plain LoRA training without Flotilla.

usage: plain_training.py MODEL DATA OUT
"""

import json
import sys

from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

model_dir, data, out = sys.argv[1:]

tokenizer = PreTrainedTokenizerFast(
    tokenizer_file=f"{model_dir}/tokenizer.json", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
)
model = AutoModelForCausalLM.from_pretrained(model_dir)
model = get_peft_model(
    model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
)


def example(line):
    pair = json.loads(line)
    ids = tokenizer(pair["prompt"] + pair["completion"])["input_ids"]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}


with open(data) as lines:
    examples = [example(line) for line in lines]


def collate(batch):
    longest = max(len(one["input_ids"]) for one in batch)
    padded = tokenizer.pad(
        [{"input_ids": one["input_ids"]} for one in batch],
        padding="max_length",
        max_length=longest,
        return_tensors="pt",
    )
    padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    return padded


arguments = TrainingArguments(
    output_dir=out,
    max_steps=30,
    save_steps=5,
    save_total_limit=2,
    logging_steps=1,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collate)
trainer.train()
