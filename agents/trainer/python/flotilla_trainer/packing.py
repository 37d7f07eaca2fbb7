"""Packs sequences into one row without padding: none attends to another, and each begins at
position 0.

All layers besides attention work on single tokens and receive the row unchanged. Attention splits
the row into batches of sequences of similar length.
"""

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Models with causal attention behind one interface, which use the given positions.
MODEL_TYPES = ("llama", "qwen2", "qwen3")

# A batch contains sequences of at least this share of its longest.
ALIKE = 0.75

_NAMES = {"sdpa": "flotilla_packed_sdpa", "eager": "flotilla_packed_eager"}


def attention(config, policy):
    """Returns the name of an attention that can split rows, or None if it cannot replace the
    model's own."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config.model_type not in MODEL_TYPES or kinds != {"full_attention"}:
        return None
    return _NAMES[policy.attention]


def row_logits(model, part):
    """Computes logits only where the next token is scored: they are most of a step's memory."""
    return model(
        input_ids=part["input_ids"],
        position_ids=part["position_ids"],
        logits_to_keep=part["rows"],
        layout=part["layout"].to(part["input_ids"].device),
        use_cache=False,
    ).logits[0]


class Layout:
    """The positions of the sequences of a row, by descending length."""

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
            # Positions after a sequence's end are masked, and dropped afterwards.
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
