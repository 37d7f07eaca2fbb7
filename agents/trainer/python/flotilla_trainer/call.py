"""Parses the training call strictly: unknown fields are rejected, so that no feature can be enabled
by passing it through."""

import dataclasses

from .errors import Refused


@dataclasses.dataclass
class Lora:
    r: int
    alpha: float
    target_modules: list
    dropout: float = 0.0
    # Only B is trained.
    freeze_a: bool = False
    # NF4: the base is in 4 bits.
    quantization: str = "NONE"


@dataclasses.dataclass
class Objective:
    name: str = ""
    # Those that differ from the defaults.
    settings: dict = None
    # Other weights drew the samples than those from which the training starts.
    off_policy: bool = False


@dataclasses.dataclass
class Across:
    """Only the coordinator needs these; the slice has what this box does."""

    workers: int = 0
    every: int = 0
    outer_rate: float = 0.0
    outer_momentum: float = 0.0
    method: str = "STEP"
    send_share: float = 0.0


@dataclasses.dataclass
class Training:
    """The training parameters of the order. Protobuf's JSON omits zeros, so the defaults are 0."""

    learning_rate: float = 0.0
    schedule: str = "SCHEDULE_UNSPECIFIED"
    epochs: int = 0
    max_steps: int = 0
    batch_size: int = 0
    micro_batch_tokens: int = 0
    warmup_ratio: float = 0.0
    final_ratio: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    max_grad_norm: float = 0.0
    max_tokens: int = 0
    save_every: int = 0
    packing: bool = True
    lora: Lora = None
    objective: Objective = None
    across: Across = None


@dataclasses.dataclass
class Policy:
    """The settings of the host's profile, and the save interval."""

    device: str
    dtype: str
    attention: str
    gradient_checkpointing: bool
    dataloader_workers: int
    pin_memory: bool
    micro_batch_tokens: int
    memory_fraction: float
    save_s: float
    # How often the tokens of a pass are halved, after the host ran out of memory.
    halvings: int = 0


@dataclasses.dataclass
class Resume:
    checkpoint: str
    state: str
    step: int
    tokens: int
    trained_tokens: int
    wall_s: float


@dataclasses.dataclass
class Slice:
    """A range of steps, in a training on several boxes."""

    # Steps before the first one.
    first: int
    # 0 to save the new adapter.
    steps: int
    # The adapter to start from; None to create a new one.
    start: str = None
    # The directory of the optimizer's state; None for a new state.
    state: str = None
    # The learning rate rises and falls within the slice.
    own_schedule: bool = False
    # The file with completions of which the start's likelihood is measured, instead of training.
    heldout: str = None
    # Whether the canary is scored with the start, instead of training.
    canary: bool = False


@dataclasses.dataclass
class Call:
    base: str
    base_name: str
    random_init: bool
    adapter: str
    dataset: str
    training: Training
    seed: int
    out: str
    resume: Resume
    policy: Policy
    # The text whose log-probabilities the last step reports; empty for none.
    canary: str = ""
    # The steps to take; None for all.
    slice: Slice = None

    def pass_tokens(self):
        """The tokens of one forward and backward pass, which do not affect a step's gradient."""
        tokens = self.training.micro_batch_tokens or self.policy.micro_batch_tokens
        return max(tokens >> self.policy.halvings, 1)


def read(request):
    """Parses the call. Errors name the invalid field."""
    call = _parse_object(Call, request, "the call")
    call.training = _parse_object(Training, _to_snake_case(call.training), "training")
    if call.training.lora is not None:
        lora = _to_snake_case(call.training.lora)
        call.training.lora = _parse_object(Lora, lora, "training.lora")
    if call.training.objective is not None:
        objective = _to_snake_case(call.training.objective)
        objective = _parse_object(Objective, objective, "training.objective")
        call.training.objective = objective
    if call.training.across is not None:
        across = _to_snake_case(call.training.across)
        call.training.across = _parse_object(Across, across, "training.across")
    if call.slice is not None:
        call.slice = _parse_object(Slice, call.slice, "slice")
    call.policy = _parse_object(Policy, call.policy, "policy")
    if call.resume is not None:
        call.resume = _parse_object(Resume, call.resume, "resume")
    _check(call.training, call.policy)
    return call


def _parse_object(kind, value, name):
    if not isinstance(value, dict):
        raise Refused(f"{name} is not an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise Refused(
            f"{name}: field {unknown[0]!r} is unknown to this trainer; known fields: "
            f"{', '.join(fields)}"
        )
    missing = [
        field.name
        for field in fields.values()
        if field.default is dataclasses.MISSING and field.name not in value
    ]
    if missing:
        raise Refused(f"{name}: field {missing[0]!r} is missing")
    return kind(**value)


def _to_snake_case(value):
    """Converts the camelCase names of Protobuf's JSON."""
    if not isinstance(value, dict):
        return value
    return {"".join(f"_{c.lower()}" if c.isupper() else c for c in name): field
            for name, field in value.items()}  # fmt: skip


def _check(training, policy):
    def number(value):
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    for name in ("learning_rate", "weight_decay", "max_grad_norm"):
        value = getattr(training, name)
        _require(number(value) and 0 <= value < float("inf"), name, value, "0 or more")
    for name in ("warmup_ratio", "final_ratio"):
        value = getattr(training, name)
        _require(number(value) and 0 <= value <= 1, name, value, "0 to 1")
    for name in ("beta1", "beta2"):
        value = getattr(training, name)
        _require(number(value) and 0 <= value < 1, name, value, "0 to below 1")
    if training.lora is not None:
        rate = training.lora.dropout
        _require(number(rate) and 0 <= rate < 1, "lora.dropout", rate, "0 to below 1")
        quantization = training.lora.quantization
        known = quantization in ("NONE", "NF4")
        _require(known, "lora.quantization", quantization, "NONE or NF4")
    halvings = policy.halvings
    is_count = isinstance(halvings, int) and not isinstance(halvings, bool)
    _require(is_count and 0 <= halvings <= 31, "policy.halvings", halvings, "0 to 31")
    _require(isinstance(training.packing, bool), "packing", training.packing, "true or false")
    _require(training.batch_size > 0, "batch_size", training.batch_size, "1 or more")
    either = training.epochs > 0 or training.max_steps > 0
    _require(either, "epochs", training.epochs, "1 or more, or max_steps")
    schedules = ("CONSTANT", "LINEAR", "COSINE")
    _require(training.schedule in schedules, "schedule", training.schedule, ", ".join(schedules))
    for name, values in (("dtype", ("f32", "f16", "bf16")), ("attention", ("sdpa", "eager"))):
        value = getattr(policy, name)
        if value not in values:
            raise Refused(f"policy.{name} is {value!r}, expected one of {', '.join(values)}")
    if policy.dtype == "f16" and policy.device == "cpu":
        raise Refused("policy.dtype f16 needs a GPU; on a CPU choose f32 or bf16")


def _require(valid, name, value, expected):
    if not valid:
        raise Refused(f"train parameter `{name}` is {value}, expected {expected}")
