"""Tokenizes prompt and completion as one sequence, exactly as the embedded engine does: the
completion and one end token are scored, and examples that are too long are skipped, never cut."""

import dataclasses
import json
import os

from .errors import Refused

# PyTorch's label for positions that a loss ignores.
IGNORED = -100


@dataclasses.dataclass
class Example:
    # Counted from 1.
    line: int
    prompt: str
    completion: str
    advantage: float = None
    # The completion was cut before its end, so that no end follows it.
    unfinished: bool = False
    # The log-probability of each token when it was drawn, in nats.
    behaviour: list = None
    # The log-probability of each token by a teacher, in nats.
    teacher: list = None
    # The tokens of the completion, if they are not those of its text.
    token_ids: list = None
    # Ranges [start, end) of these tokens that a model did not draw, and that are not learned.
    masked: list = None


def read(path):
    """Returns the examples. Blank lines count as lines."""
    examples = []
    with open(path, "rb") as file:
        try:
            lines = file.read().decode("utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise Refused(f"read the dataset: not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        examples.append(_parse_example(number, line))
    if not examples:
        raise Refused("read the dataset: no examples in it")
    return examples


def _parse_example(number, line):
    expected = '{"prompt": "2+2=", "completion": "4"}'
    try:
        value = json.loads(line)
        example = Example(
            line=number,
            prompt=value.get("prompt", ""),
            completion=value["completion"],
            advantage=value.get("advantage"),
            unfinished=value.get("unfinished", False),
            behaviour=value.get("behaviour"),
            teacher=value.get("teacher"),
            token_ids=value.get("token_ids"),
            masked=value.get("masked"),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        example = Example(number, None, None)
    if not isinstance(example.prompt, str) or not isinstance(example.completion, str):
        raise Refused(f"read the dataset: line {number}: expected an object such as {expected}")
    if not example.completion:
        raise Refused(f'read the dataset: line {number}: field "completion" is empty')
    return example


class Sequences:
    """The examples that are not too long, tokenized on access. All are checked at creation. With a
    `unit` of 2, examples are pairs, which are kept or skipped together."""

    def __init__(self, examples, tokenizer, end_token, vocab_size, max_tokens, positions, unit=1):
        self._examples, self._tokenizer, self._end = examples, tokenizer, end_token
        most = min(max_tokens or positions, positions)
        kept, shortest = [], None
        for index, example in enumerate(examples):
            tokens, *_ = self[index]
            highest = max(tokens)
            if highest >= vocab_size:
                raise Refused(
                    f"example on line {example.line}: the tokenizer yields token {highest} but "
                    f"config.json says vocab_size {vocab_size}; the two files do not belong together"
                )
            if len(tokens) <= most:
                kept.append(index)
            else:
                shortest = min(len(tokens), shortest or len(tokens))
        if unit == 2:
            both = set(kept)
            kept = [index for index in kept if index ^ 1 in both]
        self.skipped = len(examples) - len(kept)
        if not kept:
            raise Refused(
                f"all {len(examples)} examples are longer than the {most} tokens allowed, the "
                f"shortest has {shortest}; raise training.max_tokens (the model has {positions} "
                "positions)"
            )
        self._examples = [examples[index] for index in kept]

    def examples(self):
        """Returns the example of each sequence."""
        return self._examples

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        """Returns the tokens, the positions of the scored ones, and the index."""
        example = self._examples[index]
        tokens = self._tokenizer.encode(example.prompt, add_special_tokens=True).ids
        # The first token cannot be predicted, because it has no context.
        scored_from = max(len(tokens), 1)
        if example.token_ids:
            scored = _unmasked(example, len(tokens), scored_from)
            return tokens + example.token_ids, scored, index
        tokens += self._tokenizer.encode(example.completion, add_special_tokens=False).ids
        tokens += [] if example.unfinished else [self._end]
        return tokens, range(scored_from, len(tokens)), index


def _unmasked(example, prompt, scored_from):
    """Returns the positions of the drawn tokens behind a prompt of `prompt` tokens."""
    count = len(example.token_ids)
    if not example.masked:
        return range(scored_from, prompt + count)
    masked, before = set(), 1
    for start, end in example.masked:
        if not before <= start <= end <= count:
            raise Refused(
                f"example on line {example.line}: the masked tokens {start} to {end} of a "
                f"completion of {count} tokens are out of bounds, or not in ascending order"
            )
        masked.update(range(prompt + start, prompt + end))
        before = end
    return [at for at in range(scored_from, prompt + count) if at not in masked]


def load_tokenizer(directory):
    from tokenizers import Tokenizer

    path = f"{directory}/tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise Refused(f"could not load {path}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def end_token(base):
    """Returns the token that ends a completion: of the end tokens of config.json and
    generation_config.json, the eos_token of tokenizer_config.json, otherwise the first."""
    tokens = []
    for name in ("config.json", "generation_config.json"):
        fields = _read(base, name)
        named = fields.get("eos_token_id")
        text = fields.get("text_config")
        if named is None and isinstance(text, dict):
            named = text.get("eos_token_id")
        tokens += named if isinstance(named, list) else [named]
    tokens = [token for token in tokens if isinstance(token, int)]
    if not tokens:
        raise Refused(
            "the model's config.json names no eos_token_id to end a completion with; add it"
        )
    end = _tokenizer_end(base)
    return end if end in tokens else tokens[0]


def _tokenizer_end(base):
    settings = _read(base, "tokenizer_config.json")
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None
    for number, added in (settings.get("added_tokens_decoder") or {}).items():
        if added.get("content") == token:
            return int(number)
    for added in _read(base, "tokenizer.json").get("added_tokens") or []:
        if added.get("content") == token:
            return added.get("id")
    return None


def _read(base, name):
    path = os.path.join(base, name)
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


class PassCollator:
    """Splits a step's examples into passes of at most `pass_tokens` tokens with padding, or of one
    longer example. Similar lengths share a pass to reduce padding. The gradient does not change.
    `unit` examples that follow each other stay in one pass."""

    def __init__(self, pass_tokens, packed, unit=1):
        self.pass_tokens, self.packed, self.unit = pass_tokens, packed, unit

    def __call__(self, sequences):
        starts = range(0, len(sequences), self.unit)
        units = [sequences[start : start + self.unit] for start in starts]
        parts, filled = [], 0
        for together in sorted(units, key=lambda unit: -_longest(unit)):
            # The first examples of a pass have its longest.
            longest = _longest(together if not parts else parts[-1])
            size = self._size(together, longest)
            if not parts or filled + size > self.pass_tokens:
                size = self._size(together, _longest(together))
                parts.append([])
                filled = 0
            parts[-1].extend(together)
            filled += size
        ordered = [sorted(part, key=lambda sequence: -len(sequence[0])) for part in parts]
        return {"parts": [(_pack if self.packed else _pad)(part) for part in ordered]}

    def _size(self, sequences, longest):
        if self.packed:
            return sum(len(sequence[0]) for sequence in sequences)
        return longest * len(sequences)


def _longest(sequences):
    return max(len(sequence[0]) for sequence in sequences)


def _counts(part, computed):
    """Returns the counts of a pass, and its sequences; `computed` includes padding."""
    lengths = [len(scored) for _, scored, *_ in part]
    return {
        "tokens": sum(len(tokens) for tokens, *_ in part),
        "scored": sum(lengths),
        "computed": computed,
        "lengths": lengths,
        "indices": [index for _, _, *indices in part for index in indices],
    }


def _pack(part):
    """Packs sequences into one row. The last token of each sequence is only a target."""
    import torch

    from .packing import Layout

    ids, positions, rows, targets = [], [], [], []
    for tokens, scored, *_ in part:
        rows.extend(len(ids) + at - 1 for at in scored)
        targets.extend(tokens[at] for at in scored)
        ids.extend(tokens[:-1])
        positions.extend(range(len(tokens) - 1))
    return {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.tensor([positions]),
        "rows": torch.tensor(rows),
        "targets": torch.tensor(targets),
        "layout": Layout([len(tokens) - 1 for tokens, *_ in part]),
        # The last token of a sequence is not computed, but counts as such.
        **_counts(part, len(ids) + len(part)),
    }


def _pad(part):
    import torch

    longest = _longest(part)
    ids = torch.zeros((len(part), longest), dtype=torch.long)
    mask = torch.zeros((len(part), longest), dtype=torch.long)
    labels = torch.full((len(part), longest), IGNORED, dtype=torch.long)
    for row, (tokens, scored, *_) in enumerate(part):
        tokens, places = torch.tensor(tokens), torch.tensor(list(scored), dtype=torch.long)
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, places] = tokens[places]
    counts = _counts(part, ids.numel())
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **counts}
