"""The log-probabilities that the trained weights assign to the order's canary text. Generators that
load these weights report the same values. One short pass, not an evaluation."""

import torch

from . import examples, packing
from .errors import Refused

# The same limits as in the embedded engine: tokens of the text, and the last of them scored.
CONTEXT = 256
SCORED = 32


def read(tokenizer, text, positions):
    """Returns the tokens and the positions of the scored ones. Special tokens are read as plain
    text; parts of characters are not scored."""
    before = tokenizer.encode_special_tokens
    tokenizer.encode_special_tokens = True
    tokens = tokenizer.encode(text, add_special_tokens=True).ids
    tokenizer.encode_special_tokens = before
    tokens = tokens[-min(CONTEXT, positions) :]
    whole = [n for n in range(1, len(tokens)) if "\ufffd" not in tokenizer.decode([tokens[n]])]
    if not whole:
        raise Refused(f"the canary {text!r} has no token to predict behind its first")
    return tokens, whole[-SCORED:]


def score(trainer, sequence, packed):
    """Returns the natural logarithms of the scored tokens' probabilities, computed like losses."""
    tokens, places = sequence
    [part] = examples.Parts(len(tokens), packed)([(tokens, places[0])])["parts"]
    model = trainer.model
    was_training = model.training
    model.eval()
    part = trainer._prepare_inputs(part)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        logits, targets = _logits(model, part, places[0])
    model.train(was_training)
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    worth = (-losses).tolist()
    return [worth[place - places[0]] for place in places]


def _logits(model, part, scored_from):
    if "layout" in part:
        return packing.row_logits(model, part), part["targets"]
    ids = part["input_ids"]
    logits = model(input_ids=ids, attention_mask=part["attention_mask"], use_cache=False).logits
    return logits[0, scored_from - 1 : -1], ids[0, scored_from:]
