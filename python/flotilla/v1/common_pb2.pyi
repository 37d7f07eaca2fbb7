from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULE_UNSPECIFIED: _ClassVar[Schedule]
    CONSTANT: _ClassVar[Schedule]
    LINEAR: _ClassVar[Schedule]
    COSINE: _ClassVar[Schedule]

class Purpose(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PURPOSE_UNSPECIFIED: _ClassVar[Purpose]
    TRAIN: _ClassVar[Purpose]
    HELDOUT: _ClassVar[Purpose]
SCHEDULE_UNSPECIFIED: Schedule
CONSTANT: Schedule
LINEAR: Schedule
COSINE: Schedule
PURPOSE_UNSPECIFIED: Purpose
TRAIN: Purpose
HELDOUT: Purpose

class Blob(_message.Message):
    __slots__ = ("digest", "bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    bytes: int
    def __init__(self, digest: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Tree(_message.Message):
    __slots__ = ("path", "manifest")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    path: str
    manifest: str
    def __init__(self, path: _Optional[str] = ..., manifest: _Optional[str] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("tree", "random_init", "adapter")
    TREE_FIELD_NUMBER: _ClassVar[int]
    RANDOM_INIT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    tree: Tree
    random_init: bool
    adapter: Tree
    def __init__(self, tree: _Optional[_Union[Tree, _Mapping]] = ..., random_init: bool = ..., adapter: _Optional[_Union[Tree, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "max_new_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("r", "alpha", "target_modules", "dropout", "freeze_a", "quantization")
    class Quantization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Lora.Quantization]
        NF4: _ClassVar[Lora.Quantization]
    NONE: Lora.Quantization
    NF4: Lora.Quantization
    R_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    FREEZE_A_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    r: int
    alpha: float
    target_modules: _containers.RepeatedScalarFieldContainer[str]
    dropout: float
    freeze_a: bool
    quantization: Lora.Quantization
    def __init__(self, r: _Optional[int] = ..., alpha: _Optional[float] = ..., target_modules: _Optional[_Iterable[str]] = ..., dropout: _Optional[float] = ..., freeze_a: bool = ..., quantization: _Optional[_Union[Lora.Quantization, str]] = ...) -> None: ...

class Training(_message.Message):
    __slots__ = ("epochs", "max_steps", "batch_size", "micro_batch_tokens", "learning_rate", "schedule", "warmup_ratio", "final_ratio", "weight_decay", "beta1", "beta2", "max_grad_norm", "max_tokens", "save_every", "lora", "packing", "objective", "across")
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_RATIO_FIELD_NUMBER: _ClassVar[int]
    FINAL_RATIO_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVE_EVERY_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    ACROSS_FIELD_NUMBER: _ClassVar[int]
    epochs: int
    max_steps: int
    batch_size: int
    micro_batch_tokens: int
    learning_rate: float
    schedule: Schedule
    warmup_ratio: float
    final_ratio: float
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    max_tokens: int
    save_every: int
    lora: Lora
    packing: bool
    objective: Objective
    across: Across
    def __init__(self, epochs: _Optional[int] = ..., max_steps: _Optional[int] = ..., batch_size: _Optional[int] = ..., micro_batch_tokens: _Optional[int] = ..., learning_rate: _Optional[float] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., warmup_ratio: _Optional[float] = ..., final_ratio: _Optional[float] = ..., weight_decay: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., max_grad_norm: _Optional[float] = ..., max_tokens: _Optional[int] = ..., save_every: _Optional[int] = ..., lora: _Optional[_Union[Lora, _Mapping]] = ..., packing: bool = ..., objective: _Optional[_Union[Objective, _Mapping]] = ..., across: _Optional[_Union[Across, _Mapping]] = ...) -> None: ...

class Across(_message.Message):
    __slots__ = ("workers", "every", "outer_rate", "outer_momentum", "method", "send_share")
    class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STEP: _ClassVar[Across.Method]
        STACK: _ClassVar[Across.Method]
        SOUP: _ClassVar[Across.Method]
    STEP: Across.Method
    STACK: Across.Method
    SOUP: Across.Method
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    OUTER_RATE_FIELD_NUMBER: _ClassVar[int]
    OUTER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SEND_SHARE_FIELD_NUMBER: _ClassVar[int]
    workers: int
    every: int
    outer_rate: float
    outer_momentum: float
    method: Across.Method
    send_share: float
    def __init__(self, workers: _Optional[int] = ..., every: _Optional[int] = ..., outer_rate: _Optional[float] = ..., outer_momentum: _Optional[float] = ..., method: _Optional[_Union[Across.Method, str]] = ..., send_share: _Optional[float] = ...) -> None: ...

class Objective(_message.Message):
    __slots__ = ("name", "settings", "off_policy")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    OFF_POLICY_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _containers.ScalarMap[str, float]
    off_policy: bool
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Mapping[str, float]] = ..., off_policy: bool = ...) -> None: ...

class Verifier(_message.Message):
    __slots__ = ("exact", "numeric", "regex", "command", "json_schema", "tool_call", "python", "pytest", "stdio", "compile", "chain", "llm_judge", "http", "environment")
    class Match(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MATCH_UNSPECIFIED: _ClassVar[Verifier.Match]
        EXACT: _ClassVar[Verifier.Match]
        LINES: _ClassVar[Verifier.Match]
        WORDS: _ClassVar[Verifier.Match]
        NUMBERS: _ClassVar[Verifier.Match]
    MATCH_UNSPECIFIED: Verifier.Match
    EXACT: Verifier.Match
    LINES: Verifier.Match
    WORDS: Verifier.Match
    NUMBERS: Verifier.Match
    class Exact(_message.Message):
        __slots__ = ("extract",)
        EXTRACT_FIELD_NUMBER: _ClassVar[int]
        extract: str
        def __init__(self, extract: _Optional[str] = ...) -> None: ...
    class Numeric(_message.Message):
        __slots__ = ("extract", "tolerance", "relative_tolerance")
        EXTRACT_FIELD_NUMBER: _ClassVar[int]
        TOLERANCE_FIELD_NUMBER: _ClassVar[int]
        RELATIVE_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
        extract: str
        tolerance: float
        relative_tolerance: float
        def __init__(self, extract: _Optional[str] = ..., tolerance: _Optional[float] = ..., relative_tolerance: _Optional[float] = ...) -> None: ...
    class Regex(_message.Message):
        __slots__ = ("pattern",)
        PATTERN_FIELD_NUMBER: _ClassVar[int]
        pattern: str
        def __init__(self, pattern: _Optional[str] = ...) -> None: ...
    class Command(_message.Message):
        __slots__ = ("argv", "timeout_s", "paths", "serve", "processes", "concurrent", "start_timeout_s")
        ARGV_FIELD_NUMBER: _ClassVar[int]
        TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        PATHS_FIELD_NUMBER: _ClassVar[int]
        SERVE_FIELD_NUMBER: _ClassVar[int]
        PROCESSES_FIELD_NUMBER: _ClassVar[int]
        CONCURRENT_FIELD_NUMBER: _ClassVar[int]
        START_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        argv: _containers.RepeatedScalarFieldContainer[str]
        timeout_s: float
        paths: _containers.RepeatedScalarFieldContainer[str]
        serve: bool
        processes: int
        concurrent: int
        start_timeout_s: float
        def __init__(self, argv: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ..., paths: _Optional[_Iterable[str]] = ..., serve: bool = ..., processes: _Optional[int] = ..., concurrent: _Optional[int] = ..., start_timeout_s: _Optional[float] = ...) -> None: ...
    class Http(_message.Message):
        __slots__ = ("url", "timeout_s", "key_env")
        URL_FIELD_NUMBER: _ClassVar[int]
        TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        KEY_ENV_FIELD_NUMBER: _ClassVar[int]
        url: str
        timeout_s: float
        key_env: str
        def __init__(self, url: _Optional[str] = ..., timeout_s: _Optional[float] = ..., key_env: _Optional[str] = ...) -> None: ...
    class JsonSchema(_message.Message):
        __slots__ = ("schema",)
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        schema: str
        def __init__(self, schema: _Optional[str] = ...) -> None: ...
    class ToolCall(_message.Message):
        __slots__ = ("ordered", "partial")
        ORDERED_FIELD_NUMBER: _ClassVar[int]
        PARTIAL_FIELD_NUMBER: _ClassVar[int]
        ordered: bool
        partial: bool
        def __init__(self, ordered: bool = ..., partial: bool = ...) -> None: ...
    class Limits(_message.Message):
        __slots__ = ("timeout_s", "memory_mib", "processes", "disk_mib", "output_kib")
        TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        MEMORY_MIB_FIELD_NUMBER: _ClassVar[int]
        PROCESSES_FIELD_NUMBER: _ClassVar[int]
        DISK_MIB_FIELD_NUMBER: _ClassVar[int]
        OUTPUT_KIB_FIELD_NUMBER: _ClassVar[int]
        timeout_s: float
        memory_mib: int
        processes: int
        disk_mib: int
        output_kib: int
        def __init__(self, timeout_s: _Optional[float] = ..., memory_mib: _Optional[int] = ..., processes: _Optional[int] = ..., disk_mib: _Optional[int] = ..., output_kib: _Optional[int] = ...) -> None: ...
    class Python(_message.Message):
        __slots__ = ("limits", "partial", "challenge")
        LIMITS_FIELD_NUMBER: _ClassVar[int]
        PARTIAL_FIELD_NUMBER: _ClassVar[int]
        CHALLENGE_FIELD_NUMBER: _ClassVar[int]
        limits: Verifier.Limits
        partial: bool
        challenge: bool
        def __init__(self, limits: _Optional[_Union[Verifier.Limits, _Mapping]] = ..., partial: bool = ..., challenge: bool = ...) -> None: ...
    class Pytest(_message.Message):
        __slots__ = ("limits", "partial", "module")
        LIMITS_FIELD_NUMBER: _ClassVar[int]
        PARTIAL_FIELD_NUMBER: _ClassVar[int]
        MODULE_FIELD_NUMBER: _ClassVar[int]
        limits: Verifier.Limits
        partial: bool
        module: str
        def __init__(self, limits: _Optional[_Union[Verifier.Limits, _Mapping]] = ..., partial: bool = ..., module: _Optional[str] = ...) -> None: ...
    class Stdio(_message.Message):
        __slots__ = ("language", "output", "limits", "partial", "compile_timeout_s")
        LANGUAGE_FIELD_NUMBER: _ClassVar[int]
        OUTPUT_FIELD_NUMBER: _ClassVar[int]
        LIMITS_FIELD_NUMBER: _ClassVar[int]
        PARTIAL_FIELD_NUMBER: _ClassVar[int]
        COMPILE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        language: str
        output: Verifier.Output
        limits: Verifier.Limits
        partial: bool
        compile_timeout_s: float
        def __init__(self, language: _Optional[str] = ..., output: _Optional[_Union[Verifier.Output, _Mapping]] = ..., limits: _Optional[_Union[Verifier.Limits, _Mapping]] = ..., partial: bool = ..., compile_timeout_s: _Optional[float] = ...) -> None: ...
    class Compile(_message.Message):
        __slots__ = ("language", "run", "output", "limits", "compile_timeout_s")
        LANGUAGE_FIELD_NUMBER: _ClassVar[int]
        RUN_FIELD_NUMBER: _ClassVar[int]
        OUTPUT_FIELD_NUMBER: _ClassVar[int]
        LIMITS_FIELD_NUMBER: _ClassVar[int]
        COMPILE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        language: str
        run: bool
        output: Verifier.Output
        limits: Verifier.Limits
        compile_timeout_s: float
        def __init__(self, language: _Optional[str] = ..., run: bool = ..., output: _Optional[_Union[Verifier.Output, _Mapping]] = ..., limits: _Optional[_Union[Verifier.Limits, _Mapping]] = ..., compile_timeout_s: _Optional[float] = ...) -> None: ...
    class Output(_message.Message):
        __slots__ = ("match", "tolerance")
        MATCH_FIELD_NUMBER: _ClassVar[int]
        TOLERANCE_FIELD_NUMBER: _ClassVar[int]
        match: Verifier.Match
        tolerance: float
        def __init__(self, match: _Optional[_Union[Verifier.Match, str]] = ..., tolerance: _Optional[float] = ...) -> None: ...
    class Chain(_message.Message):
        __slots__ = ("stages", "stop_at_failure")
        class Stage(_message.Message):
            __slots__ = ("verifier", "weight")
            VERIFIER_FIELD_NUMBER: _ClassVar[int]
            WEIGHT_FIELD_NUMBER: _ClassVar[int]
            verifier: Verifier
            weight: float
            def __init__(self, verifier: _Optional[_Union[Verifier, _Mapping]] = ..., weight: _Optional[float] = ...) -> None: ...
        STAGES_FIELD_NUMBER: _ClassVar[int]
        STOP_AT_FAILURE_FIELD_NUMBER: _ClassVar[int]
        stages: _containers.RepeatedCompositeFieldContainer[Verifier.Chain.Stage]
        stop_at_failure: bool
        def __init__(self, stages: _Optional[_Iterable[_Union[Verifier.Chain.Stage, _Mapping]]] = ..., stop_at_failure: bool = ...) -> None: ...
    class LlmJudge(_message.Message):
        __slots__ = ("url", "model", "prompt", "key_env", "timeout_s", "pass_at")
        URL_FIELD_NUMBER: _ClassVar[int]
        MODEL_FIELD_NUMBER: _ClassVar[int]
        PROMPT_FIELD_NUMBER: _ClassVar[int]
        KEY_ENV_FIELD_NUMBER: _ClassVar[int]
        TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        PASS_AT_FIELD_NUMBER: _ClassVar[int]
        url: str
        model: str
        prompt: str
        key_env: str
        timeout_s: float
        pass_at: float
        def __init__(self, url: _Optional[str] = ..., model: _Optional[str] = ..., prompt: _Optional[str] = ..., key_env: _Optional[str] = ..., timeout_s: _Optional[float] = ..., pass_at: _Optional[float] = ...) -> None: ...
    class Environment(_message.Message):
        __slots__ = ("argv", "timeout_s", "paths", "max_turns", "pass_at", "before_observation", "after_observation")
        ARGV_FIELD_NUMBER: _ClassVar[int]
        TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
        PATHS_FIELD_NUMBER: _ClassVar[int]
        MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
        PASS_AT_FIELD_NUMBER: _ClassVar[int]
        BEFORE_OBSERVATION_FIELD_NUMBER: _ClassVar[int]
        AFTER_OBSERVATION_FIELD_NUMBER: _ClassVar[int]
        argv: _containers.RepeatedScalarFieldContainer[str]
        timeout_s: float
        paths: _containers.RepeatedScalarFieldContainer[str]
        max_turns: int
        pass_at: float
        before_observation: str
        after_observation: str
        def __init__(self, argv: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ..., paths: _Optional[_Iterable[str]] = ..., max_turns: _Optional[int] = ..., pass_at: _Optional[float] = ..., before_observation: _Optional[str] = ..., after_observation: _Optional[str] = ...) -> None: ...
    EXACT_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    PYTEST_FIELD_NUMBER: _ClassVar[int]
    STDIO_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    LLM_JUDGE_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    exact: Verifier.Exact
    numeric: Verifier.Numeric
    regex: Verifier.Regex
    command: Verifier.Command
    json_schema: Verifier.JsonSchema
    tool_call: Verifier.ToolCall
    python: Verifier.Python
    pytest: Verifier.Pytest
    stdio: Verifier.Stdio
    compile: Verifier.Compile
    chain: Verifier.Chain
    llm_judge: Verifier.LlmJudge
    http: Verifier.Http
    environment: Verifier.Environment
    def __init__(self, exact: _Optional[_Union[Verifier.Exact, _Mapping]] = ..., numeric: _Optional[_Union[Verifier.Numeric, _Mapping]] = ..., regex: _Optional[_Union[Verifier.Regex, _Mapping]] = ..., command: _Optional[_Union[Verifier.Command, _Mapping]] = ..., json_schema: _Optional[_Union[Verifier.JsonSchema, _Mapping]] = ..., tool_call: _Optional[_Union[Verifier.ToolCall, _Mapping]] = ..., python: _Optional[_Union[Verifier.Python, _Mapping]] = ..., pytest: _Optional[_Union[Verifier.Pytest, _Mapping]] = ..., stdio: _Optional[_Union[Verifier.Stdio, _Mapping]] = ..., compile: _Optional[_Union[Verifier.Compile, _Mapping]] = ..., chain: _Optional[_Union[Verifier.Chain, _Mapping]] = ..., llm_judge: _Optional[_Union[Verifier.LlmJudge, _Mapping]] = ..., http: _Optional[_Union[Verifier.Http, _Mapping]] = ..., environment: _Optional[_Union[Verifier.Environment, _Mapping]] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("keep_per_prompt", "min_reward", "keep_share", "mixed", "similarity", "min_tokens", "max_tokens", "finished", "at_least", "floor", "adaptive", "replay", "keep_duplicates")
    class Adaptive(_message.Message):
        __slots__ = ("target", "step", "low", "high")
        TARGET_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        LOW_FIELD_NUMBER: _ClassVar[int]
        HIGH_FIELD_NUMBER: _ClassVar[int]
        target: float
        step: float
        low: float
        high: float
        def __init__(self, target: _Optional[float] = ..., step: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...
    class Replay(_message.Message):
        __slots__ = ("cycles", "share")
        CYCLES_FIELD_NUMBER: _ClassVar[int]
        SHARE_FIELD_NUMBER: _ClassVar[int]
        cycles: int
        share: float
        def __init__(self, cycles: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...
    KEEP_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MIN_REWARD_FIELD_NUMBER: _ClassVar[int]
    KEEP_SHARE_FIELD_NUMBER: _ClassVar[int]
    MIXED_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    ADAPTIVE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    KEEP_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    keep_per_prompt: int
    min_reward: float
    keep_share: float
    mixed: bool
    similarity: float
    min_tokens: int
    max_tokens: int
    finished: bool
    at_least: int
    floor: float
    adaptive: Selection.Adaptive
    replay: Selection.Replay
    keep_duplicates: bool
    def __init__(self, keep_per_prompt: _Optional[int] = ..., min_reward: _Optional[float] = ..., keep_share: _Optional[float] = ..., mixed: bool = ..., similarity: _Optional[float] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., finished: bool = ..., at_least: _Optional[int] = ..., floor: _Optional[float] = ..., adaptive: _Optional[_Union[Selection.Adaptive, _Mapping]] = ..., replay: _Optional[_Union[Selection.Replay, _Mapping]] = ..., keep_duplicates: bool = ...) -> None: ...

class Schedules(_message.Message):
    __slots__ = ("temperature", "learning_rate", "min_reward", "keep_share")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MIN_REWARD_FIELD_NUMBER: _ClassVar[int]
    KEEP_SHARE_FIELD_NUMBER: _ClassVar[int]
    temperature: _containers.RepeatedScalarFieldContainer[float]
    learning_rate: _containers.RepeatedScalarFieldContainer[float]
    min_reward: _containers.RepeatedScalarFieldContainer[float]
    keep_share: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, temperature: _Optional[_Iterable[float]] = ..., learning_rate: _Optional[_Iterable[float]] = ..., min_reward: _Optional[_Iterable[float]] = ..., keep_share: _Optional[_Iterable[float]] = ...) -> None: ...

class Curriculum(_message.Message):
    __slots__ = ("difficulty", "budget")
    class Difficulty(_message.Message):
        __slots__ = ("target", "explore")
        TARGET_FIELD_NUMBER: _ClassVar[int]
        EXPLORE_FIELD_NUMBER: _ClassVar[int]
        target: _containers.RepeatedScalarFieldContainer[float]
        explore: float
        def __init__(self, target: _Optional[_Iterable[float]] = ..., explore: _Optional[float] = ...) -> None: ...
    class Budget(_message.Message):
        __slots__ = ("min", "max")
        MIN_FIELD_NUMBER: _ClassVar[int]
        MAX_FIELD_NUMBER: _ClassVar[int]
        min: int
        max: int
        def __init__(self, min: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...
    DIFFICULTY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    difficulty: Curriculum.Difficulty
    budget: Curriculum.Budget
    def __init__(self, difficulty: _Optional[_Union[Curriculum.Difficulty, _Mapping]] = ..., budget: _Optional[_Union[Curriculum.Budget, _Mapping]] = ...) -> None: ...

class Gates(_message.Message):
    __slots__ = ("perplexity", "pass_rate", "diversity", "patience", "entropy", "pass_rates", "dropped_tokens", "divergence")
    class Then(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        THEN_UNSPECIFIED: _ClassVar[Gates.Then]
        TELL: _ClassVar[Gates.Then]
        ROLL_BACK: _ClassVar[Gates.Then]
        STOP: _ClassVar[Gates.Then]
    THEN_UNSPECIFIED: Gates.Then
    TELL: Gates.Then
    ROLL_BACK: Gates.Then
    STOP: Gates.Then
    class Gate(_message.Message):
        __slots__ = ("margin", "then", "suite")
        MARGIN_FIELD_NUMBER: _ClassVar[int]
        THEN_FIELD_NUMBER: _ClassVar[int]
        SUITE_FIELD_NUMBER: _ClassVar[int]
        margin: float
        then: Gates.Then
        suite: str
        def __init__(self, margin: _Optional[float] = ..., then: _Optional[_Union[Gates.Then, str]] = ..., suite: _Optional[str] = ...) -> None: ...
    PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    PASS_RATE_FIELD_NUMBER: _ClassVar[int]
    DIVERSITY_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    PASS_RATES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    perplexity: _containers.RepeatedCompositeFieldContainer[Gates.Gate]
    pass_rate: Gates.Gate
    diversity: Gates.Gate
    patience: int
    entropy: Gates.Gate
    pass_rates: _containers.RepeatedCompositeFieldContainer[Gates.Gate]
    dropped_tokens: Gates.Gate
    divergence: Gates.Gate
    def __init__(self, perplexity: _Optional[_Iterable[_Union[Gates.Gate, _Mapping]]] = ..., pass_rate: _Optional[_Union[Gates.Gate, _Mapping]] = ..., diversity: _Optional[_Union[Gates.Gate, _Mapping]] = ..., patience: _Optional[int] = ..., entropy: _Optional[_Union[Gates.Gate, _Mapping]] = ..., pass_rates: _Optional[_Iterable[_Union[Gates.Gate, _Mapping]]] = ..., dropped_tokens: _Optional[_Union[Gates.Gate, _Mapping]] = ..., divergence: _Optional[_Union[Gates.Gate, _Mapping]] = ...) -> None: ...

class Suite(_message.Message):
    __slots__ = ("name", "text", "format", "n_ctx", "stride", "chunks")
    class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FORMAT_UNSPECIFIED: _ClassVar[Suite.Format]
        TEXT: _ClassVar[Suite.Format]
        DOCUMENTS: _ClassVar[Suite.Format]
    FORMAT_UNSPECIFIED: Suite.Format
    TEXT: Suite.Format
    DOCUMENTS: Suite.Format
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    N_CTX_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: Blob
    format: Suite.Format
    n_ctx: int
    stride: int
    chunks: int
    def __init__(self, name: _Optional[str] = ..., text: _Optional[_Union[Blob, _Mapping]] = ..., format: _Optional[_Union[Suite.Format, str]] = ..., n_ctx: _Optional[int] = ..., stride: _Optional[int] = ..., chunks: _Optional[int] = ...) -> None: ...

class PromptSuite(_message.Message):
    __slots__ = ("name", "prompts", "count", "verifier", "samples_per_prompt", "sampling", "pass_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    prompts: Blob
    count: int
    verifier: Verifier
    samples_per_prompt: int
    sampling: Sampling
    pass_at: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., prompts: _Optional[_Union[Blob, _Mapping]] = ..., count: _Optional[int] = ..., verifier: _Optional[_Union[Verifier, _Mapping]] = ..., samples_per_prompt: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., pass_at: _Optional[_Iterable[int]] = ...) -> None: ...
