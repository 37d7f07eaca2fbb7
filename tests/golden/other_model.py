"""Makes a random model of an architecture outside of Flotilla's table, and measures what PyTorch
computes of it.

    python other_model.py make OUT                            # OUT/model and OUT/adapter
    python other_model.py measure MODEL TEXT CONTEXT ADAPTER  # prints the mean loss of a token
                                                              # without and with the adapter
"""

import sys
from pathlib import Path

import peft
import torch
from make import MISTRAL_PIECES, train_pieces, wrap_tokenizer, write_text
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

# llama.cpp knows it, and reads its tokenizer from the file of SentencePiece.
KIND = "arcee"
VOCAB = 448


def make(out):
    pieces, bpe = train_pieces(MISTRAL_PIECES, write_text(300, 4), VOCAB)
    tokenizer = wrap_tokenizer(MISTRAL_PIECES, bpe)
    config = AutoConfig.for_model(
        KIND,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        # Large enough that every part of the model changes its losses.
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    (out / "model/tokenizer.model").write_bytes(pieces)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
    )
    peft.get_peft_model(model, settings).save_pretrained(out / "adapter")


def measure(base, text, context, adapter=None):
    """Returns the mean loss of the second half of each chunk, as llama-perplexity scores them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter)
    tokens = tokenizer(Path(text).read_text().removesuffix("\n"))["input_ids"]
    losses, first = [], context // 2
    for chunk in range(len(tokens) // context):
        window = tokens[chunk * context : (chunk + 1) * context]
        window[0] = tokenizer.bos_token_id
        window = torch.tensor([window])
        with torch.no_grad():
            logits = model.eval()(input_ids=window).logits[0].double()
        targets = window[0, first + 1 :]
        losses.append(
            torch.nn.functional.cross_entropy(logits[first:-1], targets, reduction="none")
        )
    return torch.cat(losses).mean().item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        model, text, context, adapter = sys.argv[2:]
        for path in (None, adapter):
            print(measure(model, text, int(context), path))
