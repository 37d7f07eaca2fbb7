"""Computes the log-probabilities that the trained weights assign to the order's canary text, in one
short pass. Generators that load these weights report the same values."""

import torch

from . import examples, packing
from .errors import Refused

# As in the embedded engine: the maximum tokens of the text, and how many of the last are scored.
CONTEXT = 256
SCORED = 32


def read(tokenizer, text, positions):
    """Returns the tokens and the positions of the scored ones. The names of special tokens count as
    plain text. Tokens that are only a part of a character are not scored."""
    previous = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    tokens = tokenizer.encode(text, add_special_tokens=True).ids
    tokenizer.encode_special_tokens = previous
    tokens = tokens[-min(CONTEXT, positions) :]
    complete = [n for n in range(1, len(tokens)) if "\ufffd" not in tokenizer.decode([tokens[n]])]
    if not complete:
        raise Refused(f"the canary {text!r} has no token to predict after its first")
    return tokens, complete[-SCORED:]


def score(trainer, sequence, packed):
    """Returns the natural logarithms of the scored tokens' probabilities."""
    tokens, scored = sequence
    places = range(scored[0], len(tokens))
    [part] = examples.PassCollator(len(tokens), packed)([(tokens, places)])["parts"]
    model = trainer.model
    was_training = model.training
    model.eval()
    part = trainer._prepare_inputs(part)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits, targets = _logits(model, part, scored[0])
    model.train(was_training)
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    logprobs = (-losses).tolist()
    return [logprobs[position - scored[0]] for position in scored]


def _logits(model, part, scored_from):
    if "layout" in part:
        return packing.row_logits(model, part), part["targets"]
    ids = part["input_ids"]
    logits = model(input_ids=ids, attention_mask=part["attention_mask"], use_cache=False).logits
    return logits[0, scored_from - 1 : -1], ids[0, scored_from:]
