"""What the weights as they were trained think of a text, token by token: by this, whoever generates
with them shows that it is them. No evaluation: one short pass, of a text that the order brings."""

import torch

from . import examples, packing
from .errors import Refused

# As the embedded engine has it: tokens that are seen, and the last of them that are scored.
CONTEXT = 256
SCORED = 32


def read(tokenizer, text, positions):
    """Tokens, and the places of those that are scored. Special tokens are letters here; parts of
    characters are not scored."""
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
    """Natural logarithms of the scored tokens' probabilities, computed as losses are."""
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
