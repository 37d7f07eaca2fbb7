"""Makes the goldens of this repository: small models, adapters and texts, and what transformers,
PEFT and llama.cpp compute of them.

    python make.py OUT LLAMA_SOURCES LLAMA_PROGRAMS [MODEL...]

LLAMA_SOURCES is a directory with llama.cpp's converters, LLAMA_PROGRAMS one with llama-perplexity.
`make goldens` fetches both and calls this. With names of models, only those are made, and the
others' files and numbers are kept. All seeds are fixed. Every perplexity is computed by torch and
by llama.cpp, and the script fails if they differ by more than 1e-5 of it.
"""

import io
import json
import logging
import math
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import peft
import sentencepiece
import torch
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "services/chat-template/src/golden"
CONTEXT = 512
STRIDE = 256
NEW_TOKENS = 24
# Of models, some of whose last ids are not those of a token.
VOCAB = 384
PROMPTS = ["The file is", "def main(", "Copyright (C) <|im_end|> 2"]

PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|" + PIECES
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
QWEN = {
    "pre": "qwen2",
    "pieces": PIECES.replace("NUMBERS", r"\p{N}"),
    "special": CHATML,
    "eos": "<|im_end|>",
    "pad": "<|endoftext|>",
}
LLAMA = {
    "pre": "llama-bpe",
    "pieces": PIECES.replace("NUMBERS", r"\p{N}{1,3}"),
    "special": HEADERS,
    "bos": "<|begin_of_text|>",
    "eos": "<|eot_id|>",
    "pad": "<|end_of_text|>",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Byte-level tokenizers of the newer models, and those of SentencePiece.
DIGITS = {"pre": "smollm", "special": ["<|end_of_text|>"], "eos": "<|end_of_text|>"}
WITHOUT_BOS = {
    "pre": "smaug-bpe",
    "pieces": PIECES.replace("NUMBERS", r"\p{N}{1,3}"),
    "special": ["<|endoftext|>", "<|pad|>"],
    "eos": "<|endoftext|>",
    "pad": "<|pad|>",
}
MISTRAL_PIECES = {
    "pre": "sentencepiece",
    "prefix": True,
    "special": ["<unk>", "<s>", "</s>"],
    "bos": "<s>",
    "eos": "</s>",
}
PHI_PIECES = MISTRAL_PIECES | {
    "special": ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|end|>"],
    "eos": "<|end|>",
}
GEMMA_PIECES = {
    "pre": "sentencepiece",
    "prefix": False,
    "special": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    "bos": "<bos>",
    "eos": "<eos>",
    "pad": "<pad>",
}
IMAGE_TOKEN = "<image_soft_token>"
# Two layers of half the width of the first models, and two heads.
SMALL = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 1024,
    "long_factor": [1.0, 1.5, 2.25, 3.0, 4.5, 6.0],
    "short_factor": [1.0, 1.0, 1.125, 1.25, 1.5, 2.0],
}

MODELS = {
    "qwen2-tiny": {
        "config": {"model_type": "qwen2", "tie_word_embeddings": True},
        "tokenizer": QWEN | {"template": "chatml"},
        "dtype": torch.float32,
        "gguf": "q8_0",
    },
    "qwen3-tiny": {
        "config": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
        "tokenizer": QWEN | {"template": "thinking"},
        "dtype": torch.bfloat16,
        "gguf": "bf16",
    },
    "llama-tiny": {
        "config": {
            "model_type": "llama",
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3_ROPE,
        },
        "tokenizer": LLAMA | {"template": "headers"},
        "dtype": torch.float32,
        "gguf": "q8_0",
    },
    "mistral-tiny": {
        "config": SMALL | {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
        "tokenizer": MISTRAL_PIECES,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "gemma2-tiny": {
        "config": SMALL
        | {
            "model_type": "gemma2",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 48,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
        "tokenizer": GEMMA_PIECES,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "gemma3-tiny": {
        "config": SMALL
        | {
            "model_type": "gemma3_text",
            "intermediate_size": 48,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 48,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        "tokenizer": GEMMA_PIECES,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "gemma3-images-tiny": {
        # The text part, which has more rows than the tokenizer has tokens.
        "config": SMALL
        | {
            "model_type": "gemma3_text",
            "vocab_size": SMALL["vocab_size"] + 8,
            "intermediate_size": 32,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 48,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
        "images": {
            "model_type": "gemma3",
            "image_token_index": SMALL["vocab_size"],
            "mm_tokens_per_image": 1,
            "vision_config": {
                "hidden_size": 4,
                "intermediate_size": 4,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 4,
                "patch_size": 2,
                "vision_use_head": False,
            },
        },
        "tokenizer": GEMMA_PIECES,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "phi3-tiny": {
        "config": SMALL
        | {
            "model_type": "phi3",
            "sliding_window": 2048,
            "original_max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        "tokenizer": PHI_PIECES,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "phi4-tiny": {
        "config": SMALL
        | {
            "model_type": "phi3",
            "vocab_size": VOCAB,
            "sliding_window": None,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 1024,
            "rope_parameters": LONG_ROPE,
            "tie_word_embeddings": True,
        },
        "tokenizer": WITHOUT_BOS,
        "tokenizer_class": "GPT2Tokenizer",
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "qwen3moe-tiny": {
        "config": SMALL
        | {
            "model_type": "qwen3_moe",
            "vocab_size": VOCAB,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        "tokenizer": QWEN | {"template": "chatml"},
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "granite-tiny": {
        "config": SMALL
        | {
            "model_type": "granite",
            "vocab_size": VOCAB,
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.75,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
        "tokenizer": DIGITS,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "olmo2-tiny": {
        "config": SMALL | {"model_type": "olmo2", "vocab_size": VOCAB},
        "tokenizer": WITHOUT_BOS,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
    "smollm3-tiny": {
        "config": SMALL
        | {"model_type": "smollm3", "vocab_size": VOCAB, "num_hidden_layers": 4},
        "tokenizer": WITHOUT_BOS,
        "dtype": torch.bfloat16,
        "gguf": "q8_0",
    },
}

# Models whose numbers are in manifest.json; those of the others are in architectures.json.
FIRST = ["qwen2-tiny", "qwen3-tiny", "llama-tiny"]
# Models that the embedded engine computes.
EMBEDDED = [*FIRST, "mistral-tiny"]

TWO = ["q_proj", "v_proj"]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ADAPTERS = {
    "qwen2-r8-qv": ("qwen2-tiny", {"r": 8, "lora_alpha": 16, "target_modules": TWO}),
    "qwen3-r4-all": ("qwen3-tiny", {"r": 4, "lora_alpha": 6, "target_modules": SEVEN}),
    "llama-r8-qv": ("llama-tiny", {"r": 8, "lora_alpha": 16, "target_modules": TWO}),
    "mistral-r4-qv": ("mistral-tiny", {"r": 4, "lora_alpha": 8, "target_modules": TWO}),
    "gemma2-r4-all": ("gemma2-tiny", {"r": 4, "lora_alpha": 6, "target_modules": SEVEN}),
    "gemma3-images-r4-all": (
        "gemma3-images-tiny",
        {"r": 4, "lora_alpha": 2, "target_modules": r".*\.language_model\..*_proj"},
    ),
    "phi3-r4-all": ("phi3-tiny", {"r": 4, "lora_alpha": 6, "target_modules": FUSED}),
    "qwen3moe-r4-qkvo": (
        "qwen3moe-tiny",
        {"r": 4, "lora_alpha": 6, "target_modules": SEVEN[:4]},
    ),
    # What must be refused.
    "qwen2-dora": (
        "qwen2-tiny",
        {"r": 8, "lora_alpha": 16, "target_modules": TWO, "use_dora": True},
    ),
}

# Model, adapter, text and the number of chunks, or all.
PERPLEXITIES = [
    ("qwen2-tiny", None, "eval_docs.txt", None),
    ("qwen2-tiny", None, "eval_license.txt", None),
    ("qwen2-tiny", None, "eval_docs.txt", 8),
    ("qwen2-tiny", "qwen2-r8-qv", "eval_docs.txt", 8),
    ("qwen3-tiny", None, "eval_docs.txt", 8),
    ("qwen3-tiny", "qwen3-r4-all", "eval_docs.txt", 8),
    ("llama-tiny", None, "eval_license.txt", None),
    ("llama-tiny", None, "eval_docs.txt", 8),
    ("llama-tiny", "llama-r8-qv", "eval_docs.txt", 8),
    ("mistral-tiny", None, "eval_docs.txt", 8),
    ("mistral-tiny", "mistral-r4-qv", "eval_docs.txt", 8),
    ("gemma2-tiny", None, "eval_docs.txt", 8),
    ("gemma2-tiny", "gemma2-r4-all", "eval_docs.txt", 8),
    ("gemma3-tiny", None, "eval_docs.txt", 8),
    ("gemma3-images-tiny", None, "eval_docs.txt", 8),
    ("gemma3-images-tiny", "gemma3-images-r4-all", "eval_docs.txt", 8),
    ("phi3-tiny", None, "eval_docs.txt", 8),
    ("phi3-tiny", "phi3-r4-all", "eval_docs.txt", 8),
    ("phi4-tiny", None, "eval_docs.txt", 8),
    ("qwen3moe-tiny", None, "eval_docs.txt", 8),
    ("qwen3moe-tiny", "qwen3moe-r4-qkvo", "eval_docs.txt", 8),
    ("granite-tiny", None, "eval_docs.txt", 8),
    ("olmo2-tiny", None, "eval_docs.txt", 8),
    ("smollm3-tiny", None, "eval_docs.txt", 8),
]


def write_text(lines, seed):
    """Generates documentation of invented programs: prose, code, numbers, other scripts."""
    draw = random.Random(seed)
    one = lambda words: draw.choice(words.split())
    adjective = lambda: one("old new empty small remote quiet broken read-only local final naïve")
    noun = lambda: one(
        "file reader writer buffer stream parser server socket table index worker queue"
    )
    verb = lambda: one("opens closes reads writes checks copies returns drops splits finds keeps")
    place = lambda: draw.choice(
        "at once;on exit;in order;after 10 seconds;before the next call;per user".split(";")
    )
    number = lambda: draw.choice([draw.randrange(10), draw.randrange(100), draw.randrange(100_000)])
    kinds = [
        lambda: f"The {adjective()} {noun()} {verb()} the {noun()} {place()}.",
        lambda: f"If the {noun()} {verb()} a {adjective()} {noun()}, it doesn't {verb()[:-1]} "
        f"more than {number()} bytes; see {noun()}.{noun()}().",
        lambda: f"def {verb()}_{noun()}({noun()}, limit={number()}):\n"
        f"    return {noun()}[{number()}:{number()}]  # {adjective()}",
        lambda: f"  - `--{noun()}-{noun()} N`\t"
        f"the {adjective()} {noun()}'s size (default: {number()} KiB)",
        lambda: draw.choice(
            [
                "Grüße, élève; 文件 не найден…",
                "日本語の文書。",
                "±0.5 µs → 42 °C 🙂",
                "!!!",
                "Copyright (C) 2024",
            ]
        ),
        lambda: f'{{"{noun()}": {number()}, "{noun()}": "{adjective()}", "ok": true}}\n\n',
    ]
    said = [draw.choices(kinds, weights=[8, 6, 4, 3, 1, 1])[0]() for _ in range(lines)]
    return "".join(line + draw.choice([" ", "\n", "\n"]) for line in said)


def train_pieces(how, text, size):
    """Trains a BPE of SentencePiece. Returns its file and the same as a tokenizer of transformers."""
    special, file = how["special"], io.BytesIO()
    names = {"unk": "<unk>", "bos": how["bos"], "eos": how["eos"], "pad": how.get("pad")}
    ids = {f"{name}_id": special.index(token) if token else -1 for name, token in names.items()}
    pieces = {f"{name}_piece": token for name, token in names.items() if token}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=file,
        model_type="bpe",
        vocab_size=size,
        control_symbols=[token for token in special if token not in names.values()],
        character_coverage=0.995,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=how["prefix"],
        split_by_whitespace=True,
        num_threads=1,
        minloglevel=2,
        **ids,
        **pieces,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    vocab = {model.id_to_piece(id): id for id in range(model.vocab_size())}
    scores = {piece: model.get_score(id) for piece, id in vocab.items() if model.get_score(id)}
    merges = []
    for piece, id in vocab.items():
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        normal = not (model.is_control(id) or model.is_unknown(id) or model.is_byte(id))
        known = [(left, right) for left, right in halves if left in vocab and right in vocab]
        merges += [(-model.get_score(id), vocab[left], left, right) for left, right in known if normal]
    merges = [(left, right) for _, _, left, right in sorted(merges)]
    bpe = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    if how["prefix"]:
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        bpe.normalizer = replace
        bpe.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    start = [decoders.Strip(" ", 1, 0)] if how["prefix"] else []
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *start]
    )
    # As in Phi-3, whose spaces after it are dropped.
    strips = lambda token: token == "<|end|>"
    bpe.add_special_tokens(
        [AddedToken(token, normalized=False, rstrip=strips(token)) for token in special]
    )
    return file.getvalue(), bpe


def train_tokenizer(how, text):
    bpe = Tokenizer(models.BPE(ignore_merges=how["pre"] == "llama-bpe"))
    bpe.normalizer = normalizers.NFC() if how["pre"] == "qwen2" else None
    if pieces := how.get("pieces"):
        split = pre_tokenizers.Split(Regex(pieces), "isolated")
    else:
        split = pre_tokenizers.Digits(individual_digits=True)
    bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="pieces" not in how)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 2 - len(how["special"]),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    bpe.add_special_tokens(how["special"])
    return bpe


def wrap_tokenizer(how, bpe):
    if bos := how.get("bos"):
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, bpe.token_to_id(bos))],
        )
    name = how.get("template")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=how.get("bos"),
        eos_token=how["eos"],
        pad_token=how.get("pad"),
        unk_token="<unk>" if "<unk>" in how["special"] else None,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text() if name else None,
    )


def train_model(config, tokens):
    """Trains until a wrong rotation, bias or norm changes the perplexity much."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Biases and norms other than their defaults.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rows = tokens[: len(tokens) // 128 * 128].view(-1, 128)
    for _ in range(150):
        batch = rows[torch.randint(len(rows), (8,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def make_model(out, name, text):
    how = MODELS[name]
    images = how.get("images")
    if how["tokenizer"]["pre"] == "sentencepiece":
        size = images["image_token_index"] if images else how["config"]["vocab_size"]
        pieces, bpe = train_pieces(how["tokenizer"], text, size)
    else:
        pieces, bpe = None, train_tokenizer(how["tokenizer"], text)
    if images:
        bpe.add_special_tokens([IMAGE_TOKEN])
    tokenizer = wrap_tokenizer(how["tokenizer"], bpe)
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    settings = common | how["config"]
    if images:
        ends = {"eos_token_id": settings["eos_token_id"]}
        settings = images | ends | {"text_config": settings}
    config = AutoConfig.for_model(**settings)
    model = train_model(config, torch.tensor(tokenizer(text)["input_ids"])).to(how["dtype"])
    model.save_pretrained(out / "hf" / name)
    tokenizer.save_pretrained(out / "hf" / name)
    if name not in FIRST:
        # The file is half as large without its indentation.
        path = out / "hf" / name / "tokenizer.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    changes = {"tokenizer_class": how["tokenizer_class"]} if "tokenizer_class" in how else {}
    if images:
        # llama.cpp's converter looks for it here, where published models have it.
        token = {"content": IMAGE_TOKEN, "special": True}
        changes["added_tokens_decoder"] = {str(images["image_token_index"]): token}
    if changes:
        path = out / "hf" / name / "tokenizer_config.json"
        settings = json.loads(path.read_text()) | changes
        path.write_text(json.dumps(settings, indent=2) + "\n")
    if pieces:
        # The converters need the file, and say `tokenizer.model` of it.
        (out / "hf" / name / "tokenizer.model").write_bytes(pieces)


def load_model(out, name, adapter=None):
    # The plain implementation of attention, not an optimized kernel.
    model = AutoModelForCausalLM.from_pretrained(
        out / "hf" / name, dtype=torch.float32, attn_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(model, out / "peft" / adapter) if adapter else model


def make_adapter(out, name):
    model, settings = ADAPTERS[name]
    torch.manual_seed(2)
    # Both factors are random, so that the adapter changes the model.
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    path = out / "peft" / name
    peft.get_peft_model(load_model(out, model), config).save_pretrained(path)
    (path / "README.md").unlink()
    config = json.loads((path / "adapter_config.json").read_text())
    # PEFT writes a set, whose order is random, and the path of the base.
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    config["base_model_name_or_path"] = f"hf/{model}"
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def convert(sources, script, pre, *arguments):
    """Runs a converter of llama.cpp. It finds the pre-tokenizer by hashing the tokens of a text,
    which suits only known vocabularies: it is told instead."""
    from conversion import base

    told = mock.patch.object(base.TextModel, "get_vocab_base_pre", lambda *_: pre)
    with told, mock.patch.object(sys, "argv", [script, *map(str, arguments)]):
        runpy.run_path(str(sources / script), run_name="__main__")


def convert_model(sources, out, name, dtype, path):
    pre = MODELS[name]["tokenizer"]["pre"]
    convert(
        sources,
        "convert_hf_to_gguf.py",
        pre,
        out / "hf" / name,
        "--outtype",
        dtype,
        "--outfile",
        path,
    )


def convert_adapter(sources, out, name):
    base = out / "hf" / ADAPTERS[name][0]
    path = out / "gguf-lora" / f"{name}.gguf"
    convert(
        sources,
        "convert_lora_to_gguf.py",
        "",
        "--base",
        base,
        "--outtype",
        "f32",
        "--outfile",
        path,
        out / "peft" / name,
    )


def losses_of_chunks(model, tokenizer, text, limit):
    """Returns the losses of the second half of each chunk, as llama-perplexity scores them."""
    tokens = tokenizer(text)["input_ids"]
    chunks = limit or len(tokens) // CONTEXT
    losses = []
    for chunk in range(chunks):
        window = tokens[chunk * CONTEXT : (chunk + 1) * CONTEXT]
        if tokenizer.bos_token_id is not None:
            window[0] = tokenizer.bos_token_id
        window = torch.tensor([window])
        with torch.no_grad():
            logits = model(input_ids=window).logits[0].double()
        first = CONTEXT // 2
        targets = window[0, first + 1 :]
        losses.append(
            torch.nn.functional.cross_entropy(logits[first:-1], targets, reduction="none")
        )
    return chunks, torch.cat(losses)


def perplexity_of_llama_cpp(programs, gguf, adapter, text, chunks):
    command = [
        programs / "llama-perplexity",
        "-c",
        CONTEXT,
        "-fa",
        "off",
        "-ctk",
        "f32",
        "-ctv",
        "f32",
    ]
    command += ["-t", 1, "--chunks", chunks, "-f", text, "-m", gguf]
    command += ["--lora", adapter] if adapter else []
    # The last lines are lost every other time.
    for _ in range(50):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        if found := re.search(r"Final estimate: PPL = (\S+) \+/- (\S+)", done.stdout + done.stderr):
            return found.groups()
    raise SystemExit("llama-perplexity lost its result 50 times")


def measure(out, programs, ggufs, model, adapter, text, limit):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "hf" / model)
    path = out / "corpus" / text
    chunks, losses = losses_of_chunks(
        load_model(out, model, adapter).eval(), tokenizer, path.read_text(), limit
    )
    mean = losses.mean().item()
    perplexity = math.exp(mean)
    error = losses.std().item() / math.sqrt(len(losses)) * perplexity
    of_torch = (f"{perplexity:.4f}", f"{error:.5f}")
    lora = out / "gguf-lora" / f"{adapter}.gguf" if adapter else None
    of_llama_cpp = perplexity_of_llama_cpp(programs, ggufs / model, lora, path, chunks)
    print(model, adapter, text, chunks, of_torch, of_llama_cpp, flush=True)
    for one, other in zip(of_torch, of_llama_cpp):
        assert math.isclose(float(one), float(other), rel_tol=1e-5)
    return {
        "model": model,
        "adapter": adapter,
        "text": text,
        "limit": limit,
        "chunks": chunks,
        "perplexity": of_torch[0],
        "stderr": of_torch[1],
        "mean_nll": f"{mean:.6f}",
    }


def measure_sliding(out, name, text):
    """Scores every token once, with the context before it, as transformers' guide to perplexity."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "hf" / name)
    model = load_model(out, name).eval()
    # llama-perplexity leaves out the last newline, and Flotilla too.
    content = (out / "corpus" / text).read_text().removesuffix("\n")
    tokens = torch.tensor(tokenizer(content)["input_ids"])
    total, scored = 0.0, 0
    for begin in range(0, len(tokens), STRIDE):
        window = tokens[begin : begin + CONTEXT]
        new = max(scored + 1 - begin, 1)
        with torch.no_grad():
            logits = model(input_ids=window[None]).logits[0].double()
        losses = torch.nn.functional.cross_entropy(
            logits[new - 1 : -1], window[new:], reduction="none"
        )
        total, scored = total + losses.sum().item(), scored + len(losses)
        if begin + CONTEXT >= len(tokens):
            break
    mean = total / scored
    return {
        "model": name,
        "text": text,
        "stride": STRIDE,
        "tokens": scored,
        "perplexity": f"{math.exp(mean):.4f}",
        "mean_nll": f"{mean:.6f}",
        "bits_per_byte": f"{total / math.log(2) / len(content.encode()):.6f}",
    }


def generate(out, model, adapter):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "hf" / model)
    loaded = load_model(out, model, adapter).eval()
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        answer = loaded.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
        )
        tokens = answer[0, tokens.shape[1] :].tolist()
        yield {"model": model, "adapter": adapter, "prompt": prompt, "tokens": tokens}


def version_of_llama_cpp(programs):
    done = subprocess.run(
        [str(programs / "llama-perplexity"), "--version"], capture_output=True, text=True
    )
    return re.search(r"version: (.*)", done.stdout + done.stderr).group(1)


def write_manifest(path, sections):
    """Writes each row on its own line."""
    rows = lambda section: ",\n".join(f"  {json.dumps(row)}" for row in section)
    lines = [f' "{name}": [\n{rows(section)}\n ]' for name, section in sections.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The models are so small that more threads would be slower; and sums keep their order.
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    out, sources, programs = map(Path, sys.argv[1:4])
    names = sys.argv[4:]
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    corpus = out / "corpus"
    if not names:
        for directory in ["hf", "peft", "gguf", "gguf-lora", "corpus"]:
            shutil.rmtree(out / directory, ignore_errors=True)
            (out / directory).mkdir(parents=True)
        (corpus / "eval_docs.txt").write_text(write_text(280, 3))
    licence = (ROOT / "LICENSE").read_text()
    half = len(licence) // 2
    (corpus / "eval_license.txt").write_text(licence[half:])
    text = write_text(1500, 4) + 3 * licence[:half]
    is_made = lambda name: not names or name in names
    wanted = [figure for figure in PERPLEXITIES if is_made(figure[0])]
    with tempfile.TemporaryDirectory() as directory:
        ggufs = Path(directory)
        for name, how in MODELS.items():
            if is_made(name):
                make_model(out, name, text)
                convert_model(sources, out, name, "f32", ggufs / name)
                convert_model(sources, out, name, how["gguf"], out / "gguf" / f"{name}.gguf")
                (out / "hf" / name / "tokenizer.model").unlink(missing_ok=True)
        for name, (model, settings) in ADAPTERS.items():
            if is_made(model):
                make_adapter(out, name)
                if not settings.get("use_dora"):
                    convert_adapter(sources, out, name)
        figures = [measure(out, programs, ggufs, *figure) for figure in wanted]
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "llama.cpp": version_of_llama_cpp(programs),
        "converters": sources.name,
    }
    policies = {figure[:2] for figure in wanted if figure[0] in EMBEDDED}
    generations = [row for policy in sorted(policies, key=str) for row in generate(out, *policy)]
    made_with = [{"program": name, "version": version} for name, version in versions.items()]
    for file, is_here in [
        ("manifest.json", lambda name: name in FIRST),
        ("architectures.json", lambda name: name not in FIRST),
    ]:
        manifest = {"made_with": made_with, "perplexities": figures, "generations": generations}
        if "qwen2-tiny" in [name for name in MODELS if is_here(name) and is_made(name)]:
            manifest["sliding"] = [measure_sliding(out, "qwen2-tiny", "eval_docs.txt")]
        kept = json.loads((out / file).read_text()) if names else {}
        for section in ["perplexities", "sliding", "generations"]:
            new = [row for row in manifest.get(section, []) if is_here(row["model"])]
            old = [row for row in kept.get(section, []) if not is_made(row["model"])]
            manifest[section] = old + new
        if not names or any(is_here(name) for name in names):
            write_manifest(out / file, manifest)


if __name__ == "__main__":
    main()
