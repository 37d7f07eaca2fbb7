"""Packs sequences into one row without padding. They do not attend to each other, and the positions
of each start at 0.

Only attention mixes tokens, so the other layers process the row unchanged. Attention splits the row
into batches of sequences of similar length.
"""

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Models whose causal attention can be replaced, and which use the given positions.
MODEL_TYPES = ("llama", "qwen2", "qwen3")

# The minimum length of a sequence in a batch, as a share of the batch's longest.
MIN_LENGTH_SHARE = 0.75

_NAMES = {"sdpa": "flotilla_packed_sdpa", "eager": "flotilla_packed_eager"}


def attention(config, policy):
    """Returns the name of the attention for packed rows, or None if it cannot replace the model's
    attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in MODEL_TYPES or kinds != {"full_attention"}:
        return None
    return _NAMES[policy.attention]


def row_logits(model, part):
    """Computes logits only where the next token is scored, as they use most of a step's memory."""
    return model(
        input_ids=part["input_ids"],
        position_ids=part["position_ids"],
        logits_to_keep=part["rows"],
        layout=part["layout"].to(part["input_ids"].device),
        use_cache=False,
    ).logits[0]


class Layout:
    """The indices that split a row into batches, and those that restore the row. Sequences must be
    in order of descending length."""

    def __init__(self, lengths):
        groups, start = [], 0
        for length in lengths:
            if not groups or length < MIN_LENGTH_SHARE * groups[-1][0][1]:
                groups.append([])
            groups[-1].append((start, length))
            start += length
        self.groups, back, before = [], [], 0
        for group in groups:
            longest = group[0][1]
            # Shorter sequences are extended by the tokens behind them. Causal attention hides these
            # from the sequence, and `back` drops their results.
            rows = [min(begin + i, start - 1) for begin, _ in group for i in range(longest)]
            self.groups.append((torch.tensor(rows), len(group)))
            for index, (_, length) in enumerate(group):
                first = before + index * longest
                back.extend(range(first, first + length))
            before += len(rows)
        self.back = torch.tensor(back)

    def to(self, device):
        self.groups = [(rows.to(device), count) for rows, count in self.groups]
        self.back = self.back.to(device)
        return self


def _attend(module, query, key, value, _mask, *, layout, dropout=0.0, scaling=None, **_options):
    parts = []
    for rows, count in layout.groups:
        # [1, heads, row, dim] to [sequences, heads, positions, dim]
        split = [
            states[0].index_select(1, rows).unflatten(1, (count, -1)).transpose(0, 1)
            for states in (query, key, value)
        ]
        out, _ = sdpa_attention_forward(
            module, *split, None, dropout=dropout, scaling=scaling, is_causal=True
        )
        parts.append(out.flatten(0, 1))
    return torch.cat(parts).index_select(0, layout.back).unsqueeze(0), None


def _attend_eager(*states, **options):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return _attend(*states, **options)


AttentionInterface.register(_NAMES["sdpa"], _attend)
AttentionInterface.register(_NAMES["eager"], _attend_eager)
