"""Packs sequences into one row without padding. They do not attend to each other, and the positions
of each start at 0.

Only attention mixes tokens, so the other layers process the row unchanged. Attention splits the row
into batches of sequences of similar length.
"""

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Models whose causal attention can be replaced, and which use the given positions.
MODEL_TYPES = ("granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")

# The minimum length of a sequence in a batch, as a share of the batch's longest.
MIN_LENGTH_SHARE = 0.75

# cuDNN's attention plans each new shape on the CPU for milliseconds; the lengths of batches differ
# in every step.
_BACKENDS = [
    torch.nn.attention.SDPBackend.FLASH_ATTENTION,
    torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION,
    torch.nn.attention.SDPBackend.MATH,
]

_NAMES = {"sdpa": "flotilla_packed_sdpa", "eager": "flotilla_packed_eager"}


def attention(config, policy):
    """Returns the name of the attention for packed rows, or None if it cannot replace the model's
    attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    # The only window of these models without kinds of layers.
    has_window = config.model_type in ("mistral", "phi3") and config.sliding_window
    if config.model_type not in MODEL_TYPES or kinds != {"full_attention"} or has_window:
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
    in order of descending length.

    `rows` has the place in the row of each position of the batches, `back` the position of each
    place, and `batches` the number of sequences and the length of each batch."""

    def __init__(self, lengths):
        groups, start = [], 0
        for length in lengths:
            if not groups or length < MIN_LENGTH_SHARE * groups[-1][0][1]:
                groups.append([])
            groups[-1].append((start, length))
            start += length
        self.batches, all_rows, back, before = [], [], [], 0
        for group in groups:
            longest = group[0][1]
            # Shorter sequences are extended by the tokens behind them. Causal attention hides these
            # from the sequence, and `back` drops their results.
            rows = [min(begin + i, start - 1) for begin, _ in group for i in range(longest)]
            self.batches.append((len(group), longest))
            all_rows.extend(rows)
            for index, (_, length) in enumerate(group):
                first = before + index * longest
                back.extend(range(first, first + length))
            before += len(rows)
        self.rows, self.back = torch.tensor(all_rows), torch.tensor(back)

    def to(self, device):
        self.rows, self.back = self.rows.to(device), self.back.to(device)
        return self


class _Split(torch.autograd.Function):
    """Gathers the positions of all batches from a row.

    A place that extends another sequence gets no gradient from there, so the gradient is gathered
    too. That of `index_select` adds with atomic operations, which are slow in 16 bits."""

    @staticmethod
    def forward(context, states, layout):
        context.layout = layout
        return states.index_select(0, layout.rows)

    @staticmethod
    def backward(context, gradient):
        return gradient.index_select(0, context.layout.back), None


class _Join(torch.autograd.Function):
    """Gathers a row from the positions of all batches."""

    @staticmethod
    def forward(context, states, layout):
        context.layout = layout
        return states.index_select(0, layout.back)

    @staticmethod
    def backward(context, gradient):
        layout = context.layout
        positions = gradient.new_zeros((len(layout.rows), *gradient.shape[1:]))
        return positions.index_copy_(0, layout.back, gradient), None


def _attend_packed(
    module, query, key, value, _mask, *, layout, dropout=0.0, scaling=None, **_options
):
    # [1, heads, row, dim] to [positions, heads, dim]
    split = [_Split.apply(states[0].transpose(0, 1), layout) for states in (query, key, value)]
    parts, start = [], 0
    for count, length in layout.batches:
        end = start + count * length
        # To [sequences, heads, positions, dim]
        batch = [states[start:end].unflatten(0, (count, length)).transpose(1, 2) for states in split]
        out, _ = sdpa_attention_forward(
            module, *batch, None, dropout=dropout, scaling=scaling, is_causal=True
        )
        parts.append(out.flatten(0, 1))
        start = end
    return _Join.apply(torch.cat(parts), layout).unsqueeze(0), None


def _attend_sdpa(*states, **options):
    with torch.nn.attention.sdpa_kernel(_BACKENDS):
        return _attend_packed(*states, **options)


def _attend_eager(*states, **options):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return _attend_packed(*states, **options)


AttentionInterface.register(_NAMES["sdpa"], _attend_sdpa)
AttentionInterface.register(_NAMES["eager"], _attend_eager)
