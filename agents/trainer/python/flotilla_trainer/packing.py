"""Sequences one after another in a row: none is padded, none sees another, and each begins at
position 0.

All of a model but its attention works on one token at a time and is given the row as it is.
Attention takes the row apart again, into sequences side by side that are much of one length.
"""

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Whose attention is causal, goes by one interface and reads positions as they are given.
MODEL_TYPES = ("llama", "qwen2", "qwen3")

# Side by side are sequences of at least this share of the longest.
ALIKE = 0.75

_NAMES = {"sdpa": "flotilla_packed_sdpa", "eager": "flotilla_packed_eager"}


def attention(config, policy):
    """The name of an attention that can take rows apart, or None when the model has one that it
    cannot stand in for."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in MODEL_TYPES or kinds != {"full_attention"}:
        return None
    return _NAMES[policy.attention]


def row_logits(model, part):
    """Of a row, those of the places whose next token is scored: they are most of a step's memory."""
    return model(
        input_ids=part["input_ids"],
        position_ids=part["position_ids"],
        logits_to_keep=part["rows"],
        layout=part["layout"].to(part["input_ids"].device),
        use_cache=False,
    ).logits[0]


class Layout:
    """Which places of a row are one sequence; its lengths fall."""

    def __init__(self, lengths):
        groups, start = [], 0
        for length in lengths:
            if not groups or length < ALIKE * groups[-1][0][1]:
                groups.append([])
            groups[-1].append((start, length))
            start += length
        self.groups, back, before = [], [], 0
        for group in groups:
            longest = group[0][1]
            # What stands behind a sequence's end is not seen by it, and forgotten afterwards.
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
        # [1, heads, row, dim] to [sequences, heads, places, dim]
        apart = [
            states[0].index_select(1, rows).unflatten(1, (count, -1)).transpose(0, 1)
            for states in (query, key, value)
        ]
        out, _ = sdpa_attention_forward(
            module, *apart, None, dropout=dropout, scaling=scaling, is_causal=True
        )
        parts.append(out.flatten(0, 1))
    return torch.cat(parts).index_select(0, layout.back).unsqueeze(0), None


def _attend_eagerly(*states, **options):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return _attend(*states, **options)


AttentionInterface.register(_NAMES["sdpa"], _attend)
AttentionInterface.register(_NAMES["eager"], _attend_eagerly)
