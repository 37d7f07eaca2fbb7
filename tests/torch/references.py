"""Computes references for the engine with transformers and PEFT on small models.

    python references.py OUT
    python references.py OUT MODEL ADAPTER

The first form creates models of every supported architecture in OUT, with configurations of
transformers 4 and 5, in one file and in shards, and several kinds of adapters. It writes
OUT/references.json: perplexities in the protocol of llama-perplexity, greedy generations, and the
loss of every step of LoRA trainings. All seeds are fixed. The second form loads an adapter that
another program wrote to OUT, and writes OUT/perplexity.json.
"""

import json
import random
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

VOCAB = 320
CONTEXT = 128
CHUNKS = 6
NEW_TOKENS = 24
PROMPTS = ["the old fisherman", "a small engine in the harbour ", "while the"]
TRAINING = {
    "steps": 10,
    "learning_rate": 5e-3,
    "betas": [0.9, 0.98],
    "epsilon": 1e-8,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
}


def sentences(count, seed):
    """Generates sentences of a language that small models learn in seconds."""
    draw = random.Random(seed)
    adjectives = "old small green quiet broken heavy tired lucky".split()
    nouns = "fisherman harbour engine boat lantern captain gull anchor rope island".split()
    verbs = "watches repairs carries follows forgets paints finds sells".split()
    places = "near the pier;in the fog;before the storm;under the bridge;at dawn".split(";")
    said = []
    for _ in range(count):
        noun = lambda: f"{draw.choice(adjectives)} {draw.choice(nouns)}"
        article = draw.choice(["the", "a"])
        said.append(f"{article} {noun()} {draw.choice(verbs)} the {noun()} {draw.choice(places)}.")
    return said


def tokenizer(text, with_bos):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<eos>", "<bos>", "<turn>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if with_bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", bpe.token_to_id("<bos>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<eos>", bos_token="<bos>" if with_bos else None
    )


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

MODELS = {
    "qwen2": {
        "config": {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 64},
        "generation": 4,
    },
    "qwen2-sharded": {
        "config": {"model_type": "qwen2", "tie_word_embeddings": False},
        "generation": 5,
        "shards": True,
    },
    "qwen3": {
        "config": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True},
        "generation": 4,
    },
    "qwen3-sharded": {
        "config": {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
        "generation": 5,
        "shards": True,
    },
    "llama": {
        "config": {"model_type": "llama", "attention_bias": True, "rope_parameters": LLAMA3},
        "generation": 4,
        "bos": True,
    },
    "llama-sharded": {
        "config": {"model_type": "llama", "rope_parameters": LLAMA3},
        "generation": 5,
        "shards": True,
        "dtype": torch.bfloat16,
    },
}

ADAPTERS = {
    "plain": {"r": 8, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 4, "lora_alpha": 1.5, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 3,
        "target_modules": r".*\.(q_proj|k_proj|o_proj|up_proj|down_proj)",
        "rank_pattern": {r"layers\.1\..*up_proj": 3, "up_proj": 7, "layers.0.self_attn.q_proj": 2},
        "alpha_pattern": {"k_proj": 2, r"^model.layers.\d+.mlp.down_proj": 1.5, "down_proj": 900},
    },
}

CASES = [
    ("qwen2", None),
    ("qwen2", "plain"),
    ("qwen2", "rslora"),
    ("qwen2", "patterns"),
    ("qwen2-sharded", "plain"),
    ("qwen3", None),
    ("qwen3", "patterns"),
    ("qwen3-sharded", "rslora"),
    ("llama", None),
    ("llama", "rslora"),
    ("llama-sharded", None),
    ("llama-sharded", "patterns"),
]

TRAININGS = [("qwen2", "rslora"), ("qwen3", "patterns"), ("llama", "plain")]


def train_model(config, tokens, seed):
    """Trains a model on the text for a few epochs."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Biases and norms other than their defaults.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    for step in range(90):
        batch = rows[torch.randint(len(rows), (8,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def convert_config_to_transformers_4(path):
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    config["transformers_version"] = "4.51.0"
    if config["model_type"].startswith("qwen"):
        config |= {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    path.write_text(json.dumps(config, indent=2))


def make_model(out, name, text, seed):
    how = MODELS[name]
    tok = tokenizer(text, how.get("bos", False))
    common = {
        "vocab_size": VOCAB + 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config = AutoConfig.for_model(**(common | how["config"]))
    tokens = torch.tensor(tok("\n".join(text))["input_ids"])
    model = train_model(config, tokens, seed).to(how.get("dtype", torch.float32))
    model.generation_config.eos_token_id = [tok.eos_token_id, tok.convert_tokens_to_ids(".")]
    size = "60KB" if how.get("shards") else "1GB"
    model.save_pretrained(out / name, max_shard_size=size)
    tok.save_pretrained(out / name)
    if how["generation"] == 4:
        convert_config_to_transformers_4(out / name / "config.json")


def load(out, name, dtype=torch.float32):
    # The plain implementation of attention, not an optimized kernel.
    directory = out / name
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()


def make_adapter(out, model, adapter, seed, fresh):
    path = out / f"{model}-{adapter}{'-fresh' if fresh else ''}"
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=fresh, **ADAPTERS[adapter])
    get_peft_model(load(out, model), config).save_pretrained(path)
    return path


def perplexity(model, tok, text):
    tokens = tok(text)["input_ids"]
    losses = []
    for chunk in range(CHUNKS):
        window = tokens[chunk * CONTEXT : (chunk + 1) * CONTEXT]
        if tok.bos_token_id is not None:
            window[0] = tok.bos_token_id
        window = torch.tensor([window])
        with torch.no_grad():
            logits = model(input_ids=window).logits[0].double()
        first = CONTEXT // 2
        targets = window[0, first + 1 :]
        losses.append(torch.nn.functional.cross_entropy(logits[first:-1], targets, reduction="none"))
    return torch.cat(losses).mean().exp().item()


def greedy(model, tok, prompt):
    prompt = torch.tensor([tok(prompt)["input_ids"]])
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=tok.eos_token_id,
    )
    return out[0, prompt.shape[1] :].tolist()


def round_to_bf16(values):
    return values.bfloat16().float()


def multiply_in_bf16(model):
    """Rounds both factors of every projection to bf16 and sums in f32, as processors with bf16
    instructions and the engine do. All else stays f32."""

    def round_inputs(module, scale):
        # The engine scales before it rounds.
        module.register_forward_pre_hook(lambda _, x: (round_to_bf16(x[0] * scale) / scale,))

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(round_to_bf16(parameter))
    scales = {
        module.lora_B["default"]: module.scaling["default"]
        for module in model.modules()
        if isinstance(module, LoraLayer)
    }
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            round_inputs(module, scales.get(module, 1.0))
    return model


def reference_case(out, model_name, adapter, text):
    tok = PreTrainedTokenizerFast.from_pretrained(out / model_name)
    model = load(out, model_name)
    if adapter:
        path = make_adapter(out, model_name, adapter, 100, fresh=False)
        model = PeftModel.from_pretrained(model, path).eval()
    return {
        "model": model_name,
        "adapter": path.name if adapter else None,
        "perplexity": perplexity(model, tok, text),
        "greedy": [{"prompt": p, "tokens": greedy(model, tok, p)} for p in PROMPTS],
        "perplexity_bf16": perplexity(multiply_in_bf16(model), tok, text),
    }


def reference_training(out, model_name, adapter, dtype, examples):
    """Trains with the whole dataset as one batch, so that its order does not matter."""
    tok = PreTrainedTokenizerFast.from_pretrained(out / model_name)
    path = make_adapter(out, model_name, adapter, 200, fresh=True)
    base = load(out, model_name, dtype)
    model = PeftModel.from_pretrained(base, path, is_trainable=True).train()
    rows = []
    for example in examples:
        prompt = tok(example["prompt"])["input_ids"]
        completion = tok(example["completion"], add_special_tokens=False)["input_ids"]
        completion.append(tok.eos_token_id)
        rows.append((prompt + completion, [-100] * len(prompt) + completion))
    longest = max(len(tokens) for tokens, _ in rows)
    pad = lambda values, by: values + [by] * (longest - len(values))
    tokens = torch.tensor([pad(tokens, tok.eos_token_id) for tokens, _ in rows])
    labels = torch.tensor([pad(labels, -100) for _, labels in rows])
    mask = torch.tensor([pad([1] * len(tokens), 0) for tokens, _ in rows])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(parameter.dtype == torch.float32 for parameter in trained)
    optimizer = torch.optim.AdamW(
        trained,
        lr=TRAINING["learning_rate"],
        betas=TRAINING["betas"],
        eps=TRAINING["epsilon"],
        weight_decay=TRAINING["weight_decay"],
    )
    losses = []
    for _ in range(TRAINING["steps"]):
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, TRAINING["clip_norm"])
        optimizer.step()
        losses.append(loss.item())
    name = str(dtype).removeprefix("torch.").replace("float32", "f32").replace("bfloat16", "bf16")
    return {"model": model_name, "adapter": path.name, "dtype": name, "losses": losses}


def read_adapter(out, model_name, adapter):
    tok = PreTrainedTokenizerFast.from_pretrained(out / model_name)
    with warnings.catch_warnings():
        # PEFT only warns about missing or unexpected tensors.
        warnings.simplefilter("error")
        warnings.simplefilter("default", FutureWarning)
        model = PeftModel.from_pretrained(load(out, model_name), out / adapter).eval()
    figure = perplexity(model, tok, (out / "eval.txt").read_text())
    (out / "perplexity.json").write_text(json.dumps(figure))


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The models are so small that more threads would be slower.
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    if len(sys.argv) > 2:
        return read_adapter(out, *sys.argv[2:])
    text = sentences(900, 1)
    for seed, name in enumerate(MODELS):
        make_model(out, name, text, seed)
    unseen = "\n".join(sentences(80, 2))
    (out / "eval.txt").write_text(unseen)
    subjects = sentences(12, 3)
    examples = [{"prompt": f"{sentence} again: ", "completion": sentence.upper()} for sentence in subjects]
    references = {
        "context": CONTEXT,
        "chunks": CHUNKS,
        "new_tokens": NEW_TOKENS,
        "examples": examples,
        "training": TRAINING,
        "cases": [reference_case(out, model, adapter, unseen) for model, adapter in CASES],
        "trainings": [
            reference_training(out, model, adapter, dtype, examples)
            for model, adapter in TRAININGS
            for dtype in [torch.float32, torch.bfloat16]
        ],
    }
    (out / "references.json").write_text(json.dumps(references, indent=1))


main()
