import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from flotilla.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Spec(_message.Message):
    __slots__ = ("run", "name", "submitted_at", "seed", "base", "pool", "suites", "sft", "raft", "watched", "fork", "promotion", "queue", "user", "sweep", "data_sources", "other_model_type")
    class DataSource(_message.Message):
        __slots__ = ("name", "pinned", "fields")
        NAME_FIELD_NUMBER: _ClassVar[int]
        PINNED_FIELD_NUMBER: _ClassVar[int]
        FIELDS_FIELD_NUMBER: _ClassVar[int]
        name: str
        pinned: str
        fields: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, name: _Optional[str] = ..., pinned: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ...) -> None: ...
    class Promotion(_message.Message):
        __slots__ = ("channel", "alpha", "feedback", "learning")
        CHANNEL_FIELD_NUMBER: _ClassVar[int]
        ALPHA_FIELD_NUMBER: _ClassVar[int]
        FEEDBACK_FIELD_NUMBER: _ClassVar[int]
        LEARNING_FIELD_NUMBER: _ClassVar[int]
        channel: str
        alpha: float
        feedback: int
        learning: int
        def __init__(self, channel: _Optional[str] = ..., alpha: _Optional[float] = ..., feedback: _Optional[int] = ..., learning: _Optional[int] = ...) -> None: ...
    class Queue(_message.Message):
        __slots__ = ("priority", "from_minute", "until_minute")
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        FROM_MINUTE_FIELD_NUMBER: _ClassVar[int]
        UNTIL_MINUTE_FIELD_NUMBER: _ClassVar[int]
        priority: int
        from_minute: int
        until_minute: int
        def __init__(self, priority: _Optional[int] = ..., from_minute: _Optional[int] = ..., until_minute: _Optional[int] = ...) -> None: ...
    class Sweep(_message.Message):
        __slots__ = ("name", "settings")
        class SettingsEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: str
            def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        SETTINGS_FIELD_NUMBER: _ClassVar[int]
        name: str
        settings: _containers.ScalarMap[str, str]
        def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...
    class Sft(_message.Message):
        __slots__ = ("dataset", "training")
        DATASET_FIELD_NUMBER: _ClassVar[int]
        TRAINING_FIELD_NUMBER: _ClassVar[int]
        dataset: _common_pb2.Blob
        training: _common_pb2.Training
        def __init__(self, dataset: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ..., training: _Optional[_Union[_common_pb2.Training, _Mapping]] = ...) -> None: ...
    class Raft(_message.Message):
        __slots__ = ("prompts", "prompt_count", "heldout", "heldout_count", "cycles", "prompts_per_cycle", "samples_per_prompt", "heldout_samples_per_prompt", "sampling", "verifier", "selection", "training", "accept_unverified_policy", "schedules", "curriculum", "gates", "from_base", "staleness", "pass_at", "prompt_suites", "entropy", "proof", "token_logprobs", "teacher", "dataset", "end_token")
        PROMPTS_FIELD_NUMBER: _ClassVar[int]
        PROMPT_COUNT_FIELD_NUMBER: _ClassVar[int]
        HELDOUT_FIELD_NUMBER: _ClassVar[int]
        HELDOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
        CYCLES_FIELD_NUMBER: _ClassVar[int]
        PROMPTS_PER_CYCLE_FIELD_NUMBER: _ClassVar[int]
        SAMPLES_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
        HELDOUT_SAMPLES_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
        SAMPLING_FIELD_NUMBER: _ClassVar[int]
        VERIFIER_FIELD_NUMBER: _ClassVar[int]
        SELECTION_FIELD_NUMBER: _ClassVar[int]
        TRAINING_FIELD_NUMBER: _ClassVar[int]
        ACCEPT_UNVERIFIED_POLICY_FIELD_NUMBER: _ClassVar[int]
        SCHEDULES_FIELD_NUMBER: _ClassVar[int]
        CURRICULUM_FIELD_NUMBER: _ClassVar[int]
        GATES_FIELD_NUMBER: _ClassVar[int]
        FROM_BASE_FIELD_NUMBER: _ClassVar[int]
        STALENESS_FIELD_NUMBER: _ClassVar[int]
        PASS_AT_FIELD_NUMBER: _ClassVar[int]
        PROMPT_SUITES_FIELD_NUMBER: _ClassVar[int]
        ENTROPY_FIELD_NUMBER: _ClassVar[int]
        PROOF_FIELD_NUMBER: _ClassVar[int]
        TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        TEACHER_FIELD_NUMBER: _ClassVar[int]
        DATASET_FIELD_NUMBER: _ClassVar[int]
        END_TOKEN_FIELD_NUMBER: _ClassVar[int]
        prompts: _common_pb2.Blob
        prompt_count: int
        heldout: _common_pb2.Blob
        heldout_count: int
        cycles: int
        prompts_per_cycle: int
        samples_per_prompt: int
        heldout_samples_per_prompt: int
        sampling: _common_pb2.Sampling
        verifier: _common_pb2.Verifier
        selection: _common_pb2.Selection
        training: _common_pb2.Training
        accept_unverified_policy: bool
        schedules: _common_pb2.Schedules
        curriculum: _common_pb2.Curriculum
        gates: _common_pb2.Gates
        from_base: bool
        staleness: int
        pass_at: _containers.RepeatedScalarFieldContainer[int]
        prompt_suites: _containers.RepeatedCompositeFieldContainer[_common_pb2.PromptSuite]
        entropy: bool
        proof: Spec.Proof
        token_logprobs: bool
        teacher: _common_pb2.Tree
        dataset: Spec.Dataset
        end_token: int
        def __init__(self, prompts: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ..., prompt_count: _Optional[int] = ..., heldout: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ..., heldout_count: _Optional[int] = ..., cycles: _Optional[int] = ..., prompts_per_cycle: _Optional[int] = ..., samples_per_prompt: _Optional[int] = ..., heldout_samples_per_prompt: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., verifier: _Optional[_Union[_common_pb2.Verifier, _Mapping]] = ..., selection: _Optional[_Union[_common_pb2.Selection, _Mapping]] = ..., training: _Optional[_Union[_common_pb2.Training, _Mapping]] = ..., accept_unverified_policy: bool = ..., schedules: _Optional[_Union[_common_pb2.Schedules, _Mapping]] = ..., curriculum: _Optional[_Union[_common_pb2.Curriculum, _Mapping]] = ..., gates: _Optional[_Union[_common_pb2.Gates, _Mapping]] = ..., from_base: bool = ..., staleness: _Optional[int] = ..., pass_at: _Optional[_Iterable[int]] = ..., prompt_suites: _Optional[_Iterable[_Union[_common_pb2.PromptSuite, _Mapping]]] = ..., entropy: bool = ..., proof: _Optional[_Union[Spec.Proof, _Mapping]] = ..., token_logprobs: bool = ..., teacher: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., dataset: _Optional[_Union[Spec.Dataset, _Mapping]] = ..., end_token: _Optional[int] = ...) -> None: ...
    class Dataset(_message.Message):
        __slots__ = ("lines", "examples", "run", "cycle")
        LINES_FIELD_NUMBER: _ClassVar[int]
        EXAMPLES_FIELD_NUMBER: _ClassVar[int]
        RUN_FIELD_NUMBER: _ClassVar[int]
        CYCLE_FIELD_NUMBER: _ClassVar[int]
        lines: _common_pb2.Blob
        examples: int
        run: str
        cycle: int
        def __init__(self, lines: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ..., examples: _Optional[int] = ..., run: _Optional[str] = ..., cycle: _Optional[int] = ...) -> None: ...
    class Proof(_message.Message):
        __slots__ = ("canary", "tolerance", "tokenizer")
        CANARY_FIELD_NUMBER: _ClassVar[int]
        TOLERANCE_FIELD_NUMBER: _ClassVar[int]
        TOKENIZER_FIELD_NUMBER: _ClassVar[int]
        canary: bool
        tolerance: float
        tokenizer: str
        def __init__(self, canary: bool = ..., tolerance: _Optional[float] = ..., tokenizer: _Optional[str] = ...) -> None: ...
    class Watched(_message.Message):
        __slots__ = ("source", "host")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        HOST_FIELD_NUMBER: _ClassVar[int]
        source: str
        host: str
        def __init__(self, source: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...
    class Fork(_message.Message):
        __slots__ = ("run", "cycle", "cycles", "prompts", "judged", "passed")
        RUN_FIELD_NUMBER: _ClassVar[int]
        CYCLE_FIELD_NUMBER: _ClassVar[int]
        CYCLES_FIELD_NUMBER: _ClassVar[int]
        PROMPTS_FIELD_NUMBER: _ClassVar[int]
        JUDGED_FIELD_NUMBER: _ClassVar[int]
        PASSED_FIELD_NUMBER: _ClassVar[int]
        run: str
        cycle: int
        cycles: _containers.RepeatedCompositeFieldContainer[Spec.ForkedCycle]
        prompts: _containers.RepeatedScalarFieldContainer[int]
        judged: _containers.RepeatedScalarFieldContainer[float]
        passed: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., cycles: _Optional[_Iterable[_Union[Spec.ForkedCycle, _Mapping]]] = ..., prompts: _Optional[_Iterable[int]] = ..., judged: _Optional[_Iterable[float]] = ..., passed: _Optional[_Iterable[float]] = ...) -> None: ...
    class ForkedCycle(_message.Message):
        __slots__ = ("selected", "checkpoints", "evals", "pass_rates", "done", "canary")
        SELECTED_FIELD_NUMBER: _ClassVar[int]
        CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
        EVALS_FIELD_NUMBER: _ClassVar[int]
        PASS_RATES_FIELD_NUMBER: _ClassVar[int]
        DONE_FIELD_NUMBER: _ClassVar[int]
        CANARY_FIELD_NUMBER: _ClassVar[int]
        selected: Selected
        checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
        evals: _containers.RepeatedCompositeFieldContainer[Eval]
        pass_rates: PassRates
        done: CycleDone
        canary: str
        def __init__(self, selected: _Optional[_Union[Selected, _Mapping]] = ..., checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., evals: _Optional[_Iterable[_Union[Eval, _Mapping]]] = ..., pass_rates: _Optional[_Union[PassRates, _Mapping]] = ..., done: _Optional[_Union[CycleDone, _Mapping]] = ..., canary: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SUITES_FIELD_NUMBER: _ClassVar[int]
    SFT_FIELD_NUMBER: _ClassVar[int]
    RAFT_FIELD_NUMBER: _ClassVar[int]
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCES_FIELD_NUMBER: _ClassVar[int]
    OTHER_MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    submitted_at: _timestamp_pb2.Timestamp
    seed: int
    base: _common_pb2.Base
    pool: str
    suites: _containers.RepeatedCompositeFieldContainer[_common_pb2.Suite]
    sft: Spec.Sft
    raft: Spec.Raft
    watched: Spec.Watched
    fork: Spec.Fork
    promotion: Spec.Promotion
    queue: Spec.Queue
    user: str
    sweep: Spec.Sweep
    data_sources: _containers.RepeatedCompositeFieldContainer[Spec.DataSource]
    other_model_type: str
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., submitted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., seed: _Optional[int] = ..., base: _Optional[_Union[_common_pb2.Base, _Mapping]] = ..., pool: _Optional[str] = ..., suites: _Optional[_Iterable[_Union[_common_pb2.Suite, _Mapping]]] = ..., sft: _Optional[_Union[Spec.Sft, _Mapping]] = ..., raft: _Optional[_Union[Spec.Raft, _Mapping]] = ..., watched: _Optional[_Union[Spec.Watched, _Mapping]] = ..., fork: _Optional[_Union[Spec.Fork, _Mapping]] = ..., promotion: _Optional[_Union[Spec.Promotion, _Mapping]] = ..., queue: _Optional[_Union[Spec.Queue, _Mapping]] = ..., user: _Optional[str] = ..., sweep: _Optional[_Union[Spec.Sweep, _Mapping]] = ..., data_sources: _Optional[_Iterable[_Union[Spec.DataSource, _Mapping]]] = ..., other_model_type: _Optional[str] = ...) -> None: ...

class Control(_message.Message):
    __slots__ = ("action", "reason", "user", "queue")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[Control.Action]
        PAUSE: _ClassVar[Control.Action]
        RESUME: _ClassVar[Control.Action]
        CANCEL: _ClassVar[Control.Action]
    ACTION_UNSPECIFIED: Control.Action
    PAUSE: Control.Action
    RESUME: Control.Action
    CANCEL: Control.Action
    ACTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    action: Control.Action
    reason: str
    user: str
    queue: bool
    def __init__(self, action: _Optional[_Union[Control.Action, str]] = ..., reason: _Optional[str] = ..., user: _Optional[str] = ..., queue: bool = ...) -> None: ...

class ChannelMove(_message.Message):
    __slots__ = ("base", "adapter", "run", "cycle", "step", "serving", "reason", "evidence", "user", "keeping", "roll_back", "learning", "promotion")
    class Keeping(_message.Message):
        __slots__ = ("days",)
        DAYS_FIELD_NUMBER: _ClassVar[int]
        days: int
        def __init__(self, days: _Optional[int] = ...) -> None: ...
    class Learning(_message.Message):
        __slots__ = ("spec", "files", "at_least")
        class FilesEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: _common_pb2.Blob
            def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ...) -> None: ...
        SPEC_FIELD_NUMBER: _ClassVar[int]
        FILES_FIELD_NUMBER: _ClassVar[int]
        AT_LEAST_FIELD_NUMBER: _ClassVar[int]
        spec: _common_pb2.Blob
        files: _containers.MessageMap[str, _common_pb2.Blob]
        at_least: int
        def __init__(self, spec: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ..., files: _Optional[_Mapping[str, _common_pb2.Blob]] = ..., at_least: _Optional[int] = ...) -> None: ...
    class Serving(_message.Message):
        __slots__ = ("pool", "replicas")
        POOL_FIELD_NUMBER: _ClassVar[int]
        REPLICAS_FIELD_NUMBER: _ClassVar[int]
        pool: str
        replicas: int
        def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...
    class Evidence(_message.Message):
        __slots__ = ("run", "cycle", "pairs", "p", "difference", "interval", "live")
        RUN_FIELD_NUMBER: _ClassVar[int]
        CYCLE_FIELD_NUMBER: _ClassVar[int]
        PAIRS_FIELD_NUMBER: _ClassVar[int]
        P_FIELD_NUMBER: _ClassVar[int]
        DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
        INTERVAL_FIELD_NUMBER: _ClassVar[int]
        LIVE_FIELD_NUMBER: _ClassVar[int]
        run: str
        cycle: int
        pairs: int
        p: float
        difference: float
        interval: _containers.RepeatedScalarFieldContainer[float]
        live: bool
        def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., pairs: _Optional[int] = ..., p: _Optional[float] = ..., difference: _Optional[float] = ..., interval: _Optional[_Iterable[float]] = ..., live: bool = ...) -> None: ...
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    KEEPING_FIELD_NUMBER: _ClassVar[int]
    ROLL_BACK_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_FIELD_NUMBER: _ClassVar[int]
    base: _common_pb2.Tree
    adapter: _common_pb2.Tree
    run: str
    cycle: int
    step: int
    serving: ChannelMove.Serving
    reason: str
    evidence: ChannelMove.Evidence
    user: str
    keeping: ChannelMove.Keeping
    roll_back: bool
    learning: ChannelMove.Learning
    promotion: str
    def __init__(self, base: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., adapter: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., run: _Optional[str] = ..., cycle: _Optional[int] = ..., step: _Optional[int] = ..., serving: _Optional[_Union[ChannelMove.Serving, _Mapping]] = ..., reason: _Optional[str] = ..., evidence: _Optional[_Union[ChannelMove.Evidence, _Mapping]] = ..., user: _Optional[str] = ..., keeping: _Optional[_Union[ChannelMove.Keeping, _Mapping]] = ..., roll_back: bool = ..., learning: _Optional[_Union[ChannelMove.Learning, _Mapping]] = ..., promotion: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("cycle", "jobs")
    class Job(_message.Message):
        __slots__ = ("job", "purpose", "draws", "suite")
        JOB_FIELD_NUMBER: _ClassVar[int]
        PURPOSE_FIELD_NUMBER: _ClassVar[int]
        DRAWS_FIELD_NUMBER: _ClassVar[int]
        SUITE_FIELD_NUMBER: _ClassVar[int]
        job: str
        purpose: _common_pb2.Purpose
        draws: _containers.RepeatedCompositeFieldContainer[Plan.Draw]
        suite: str
        def __init__(self, job: _Optional[str] = ..., purpose: _Optional[_Union[_common_pb2.Purpose, str]] = ..., draws: _Optional[_Iterable[_Union[Plan.Draw, _Mapping]]] = ..., suite: _Optional[str] = ...) -> None: ...
    class Draw(_message.Message):
        __slots__ = ("prompt", "first", "count")
        PROMPT_FIELD_NUMBER: _ClassVar[int]
        FIRST_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        prompt: int
        first: int
        count: int
        def __init__(self, prompt: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    jobs: _containers.RepeatedCompositeFieldContainer[Plan.Job]
    def __init__(self, cycle: _Optional[int] = ..., jobs: _Optional[_Iterable[_Union[Plan.Job, _Mapping]]] = ...) -> None: ...

class GenerateOrder(_message.Message):
    __slots__ = ("run", "cycle", "job", "attempt", "purpose", "base", "adapter", "sampling", "seed", "requests", "round", "accept_unverified_policy", "suite", "logprobs", "token_logprobs", "episodes", "canary", "behind")
    class Behind(_message.Message):
        __slots__ = ("samples", "tokens_per_s", "fastest_tokens_per_s", "fastest", "fastest_samples")
        SAMPLES_FIELD_NUMBER: _ClassVar[int]
        TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
        FASTEST_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
        FASTEST_FIELD_NUMBER: _ClassVar[int]
        FASTEST_SAMPLES_FIELD_NUMBER: _ClassVar[int]
        samples: int
        tokens_per_s: float
        fastest_tokens_per_s: float
        fastest: str
        fastest_samples: int
        def __init__(self, samples: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., fastest_tokens_per_s: _Optional[float] = ..., fastest: _Optional[str] = ..., fastest_samples: _Optional[int] = ...) -> None: ...
    class Request(_message.Message):
        __slots__ = ("prompt_id", "text", "first", "count")
        PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        FIRST_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        prompt_id: str
        text: str
        first: int
        count: int
        def __init__(self, prompt_id: _Optional[str] = ..., text: _Optional[str] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_UNVERIFIED_POLICY_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    job: str
    attempt: int
    purpose: _common_pb2.Purpose
    base: _common_pb2.Tree
    adapter: _common_pb2.Tree
    sampling: _common_pb2.Sampling
    seed: int
    requests: _containers.RepeatedCompositeFieldContainer[GenerateOrder.Request]
    round: int
    accept_unverified_policy: bool
    suite: str
    logprobs: bool
    token_logprobs: bool
    episodes: bool
    canary: str
    behind: GenerateOrder.Behind
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., job: _Optional[str] = ..., attempt: _Optional[int] = ..., purpose: _Optional[_Union[_common_pb2.Purpose, str]] = ..., base: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., adapter: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[GenerateOrder.Request, _Mapping]]] = ..., round: _Optional[int] = ..., accept_unverified_policy: bool = ..., suite: _Optional[str] = ..., logprobs: bool = ..., token_logprobs: bool = ..., episodes: bool = ..., canary: _Optional[str] = ..., behind: _Optional[_Union[GenerateOrder.Behind, _Mapping]] = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("run", "cycle", "job", "attempt", "purpose", "agent", "engine", "base", "adapter", "samples", "wall_s", "caveat", "joules", "suite", "tokenizer", "canary")
    class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        FINISH_UNSPECIFIED: _ClassVar[Samples.Finish]
        STOP: _ClassVar[Samples.Finish]
        LENGTH: _ClassVar[Samples.Finish]
    FINISH_UNSPECIFIED: Samples.Finish
    STOP: Samples.Finish
    LENGTH: Samples.Finish
    class Sample(_message.Message):
        __slots__ = ("prompt_id", "index", "text", "tokens", "finish", "logprob", "token_logprobs", "token_ids", "turns")
        PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
        INDEX_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        FINISH_FIELD_NUMBER: _ClassVar[int]
        LOGPROB_FIELD_NUMBER: _ClassVar[int]
        TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        TURNS_FIELD_NUMBER: _ClassVar[int]
        prompt_id: str
        index: int
        text: str
        tokens: int
        finish: Samples.Finish
        logprob: float
        token_logprobs: bytes
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        turns: _containers.RepeatedCompositeFieldContainer[Samples.Turn]
        def __init__(self, prompt_id: _Optional[str] = ..., index: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[int] = ..., finish: _Optional[_Union[Samples.Finish, str]] = ..., logprob: _Optional[float] = ..., token_logprobs: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., turns: _Optional[_Iterable[_Union[Samples.Turn, _Mapping]]] = ...) -> None: ...
    class Turn(_message.Message):
        __slots__ = ("text", "token_ids", "observation", "observation_ids")
        TEXT_FIELD_NUMBER: _ClassVar[int]
        TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
        OBSERVATION_FIELD_NUMBER: _ClassVar[int]
        OBSERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
        text: str
        token_ids: _containers.RepeatedScalarFieldContainer[int]
        observation: str
        observation_ids: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., observation: _Optional[str] = ..., observation_ids: _Optional[_Iterable[int]] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    CAVEAT_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    job: str
    attempt: int
    purpose: _common_pb2.Purpose
    agent: str
    engine: str
    base: str
    adapter: str
    samples: _containers.RepeatedCompositeFieldContainer[Samples.Sample]
    wall_s: float
    caveat: str
    joules: float
    suite: str
    tokenizer: str
    canary: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., job: _Optional[str] = ..., attempt: _Optional[int] = ..., purpose: _Optional[_Union[_common_pb2.Purpose, str]] = ..., agent: _Optional[str] = ..., engine: _Optional[str] = ..., base: _Optional[str] = ..., adapter: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Samples.Sample, _Mapping]]] = ..., wall_s: _Optional[float] = ..., caveat: _Optional[str] = ..., joules: _Optional[float] = ..., suite: _Optional[str] = ..., tokenizer: _Optional[str] = ..., canary: _Optional[_Iterable[float]] = ...) -> None: ...

class Scores(_message.Message):
    __slots__ = ("run", "cycle", "job", "agent", "engine", "teacher", "samples_sequence", "scores", "wall_s")
    class Score(_message.Message):
        __slots__ = ("token_logprobs",)
        TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        token_logprobs: bytes
        def __init__(self, token_logprobs: _Optional[bytes] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TEACHER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    job: str
    agent: str
    engine: str
    teacher: str
    samples_sequence: int
    scores: _containers.RepeatedCompositeFieldContainer[Scores.Score]
    wall_s: float
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., job: _Optional[str] = ..., agent: _Optional[str] = ..., engine: _Optional[str] = ..., teacher: _Optional[str] = ..., samples_sequence: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[Scores.Score, _Mapping]]] = ..., wall_s: _Optional[float] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("run", "cycle", "job", "attempt", "agent", "faster")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    FASTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    job: str
    attempt: int
    agent: str
    faster: str
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., job: _Optional[str] = ..., attempt: _Optional[int] = ..., agent: _Optional[str] = ..., faster: _Optional[str] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("agent", "base", "adapter", "said", "reference", "distance", "tolerance", "agreed", "jobs")
    class Job(_message.Message):
        __slots__ = ("cycle", "job", "again")
        CYCLE_FIELD_NUMBER: _ClassVar[int]
        JOB_FIELD_NUMBER: _ClassVar[int]
        AGAIN_FIELD_NUMBER: _ClassVar[int]
        cycle: int
        job: str
        again: str
        def __init__(self, cycle: _Optional[int] = ..., job: _Optional[str] = ..., again: _Optional[str] = ...) -> None: ...
    AGENT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    DISTANCE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    base: str
    adapter: str
    said: float
    reference: float
    distance: float
    tolerance: float
    agreed: _containers.RepeatedScalarFieldContainer[str]
    jobs: _containers.RepeatedCompositeFieldContainer[Quarantine.Job]
    def __init__(self, agent: _Optional[str] = ..., base: _Optional[str] = ..., adapter: _Optional[str] = ..., said: _Optional[float] = ..., reference: _Optional[float] = ..., distance: _Optional[float] = ..., tolerance: _Optional[float] = ..., agreed: _Optional[_Iterable[str]] = ..., jobs: _Optional[_Iterable[_Union[Quarantine.Job, _Mapping]]] = ...) -> None: ...

class Verdicts(_message.Message):
    __slots__ = ("run", "cycle", "job", "purpose", "agent", "verifier", "samples_sequence", "verdicts", "wall_s", "suite")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[Verdicts.Outcome]
        PASS: _ClassVar[Verdicts.Outcome]
        FAIL: _ClassVar[Verdicts.Outcome]
        ERROR: _ClassVar[Verdicts.Outcome]
    OUTCOME_UNSPECIFIED: Verdicts.Outcome
    PASS: Verdicts.Outcome
    FAIL: Verdicts.Outcome
    ERROR: Verdicts.Outcome
    class Verdict(_message.Message):
        __slots__ = ("prompt_id", "index", "outcome", "reward", "detail")
        PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
        INDEX_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        REWARD_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        prompt_id: str
        index: int
        outcome: Verdicts.Outcome
        reward: float
        detail: str
        def __init__(self, prompt_id: _Optional[str] = ..., index: _Optional[int] = ..., outcome: _Optional[_Union[Verdicts.Outcome, str]] = ..., reward: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    job: str
    purpose: _common_pb2.Purpose
    agent: str
    verifier: str
    samples_sequence: int
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdicts.Verdict]
    wall_s: float
    suite: str
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., job: _Optional[str] = ..., purpose: _Optional[_Union[_common_pb2.Purpose, str]] = ..., agent: _Optional[str] = ..., verifier: _Optional[str] = ..., samples_sequence: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[Verdicts.Verdict, _Mapping]]] = ..., wall_s: _Optional[float] = ..., suite: _Optional[str] = ...) -> None: ...

class Selected(_message.Message):
    __slots__ = ("cycle", "considered", "kept", "dropped", "dataset", "min_reward", "prompts", "judged", "passed", "diversity", "entropy", "entropy_samples", "retokenized")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    MIN_REWARD_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    DIVERSITY_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RETOKENIZED_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    considered: int
    kept: int
    dropped: _containers.ScalarMap[str, int]
    dataset: _common_pb2.Blob
    min_reward: float
    prompts: _containers.RepeatedScalarFieldContainer[int]
    judged: _containers.RepeatedScalarFieldContainer[int]
    passed: _containers.RepeatedScalarFieldContainer[int]
    diversity: float
    entropy: float
    entropy_samples: int
    retokenized: int
    def __init__(self, cycle: _Optional[int] = ..., considered: _Optional[int] = ..., kept: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., dataset: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ..., min_reward: _Optional[float] = ..., prompts: _Optional[_Iterable[int]] = ..., judged: _Optional[_Iterable[int]] = ..., passed: _Optional[_Iterable[int]] = ..., diversity: _Optional[float] = ..., entropy: _Optional[float] = ..., entropy_samples: _Optional[int] = ..., retokenized: _Optional[int] = ...) -> None: ...

class TrainOrder(_message.Message):
    __slots__ = ("run", "cycle", "attempt", "base", "adapter", "dataset", "training", "seed", "round", "replay", "replay_share", "canary", "slice", "merge")
    class Slice(_message.Message):
        __slots__ = ("outer", "slice", "planned", "start", "derivation", "more")
        OUTER_FIELD_NUMBER: _ClassVar[int]
        SLICE_FIELD_NUMBER: _ClassVar[int]
        PLANNED_FIELD_NUMBER: _ClassVar[int]
        START_FIELD_NUMBER: _ClassVar[int]
        DERIVATION_FIELD_NUMBER: _ClassVar[int]
        MORE_FIELD_NUMBER: _ClassVar[int]
        outer: int
        slice: int
        planned: SlicePlan.Slice
        start: _common_pb2.Tree
        derivation: _containers.RepeatedCompositeFieldContainer[TrainOrder.Merge]
        more: bool
        def __init__(self, outer: _Optional[int] = ..., slice: _Optional[int] = ..., planned: _Optional[_Union[SlicePlan.Slice, _Mapping]] = ..., start: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., derivation: _Optional[_Iterable[_Union[TrainOrder.Merge, _Mapping]]] = ..., more: bool = ...) -> None: ...
    class Merge(_message.Message):
        __slots__ = ("outer", "start", "momentum", "deltas", "checkpoint", "derivation", "derived", "heldout")
        OUTER_FIELD_NUMBER: _ClassVar[int]
        START_FIELD_NUMBER: _ClassVar[int]
        MOMENTUM_FIELD_NUMBER: _ClassVar[int]
        DELTAS_FIELD_NUMBER: _ClassVar[int]
        CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
        DERIVATION_FIELD_NUMBER: _ClassVar[int]
        DERIVED_FIELD_NUMBER: _ClassVar[int]
        HELDOUT_FIELD_NUMBER: _ClassVar[int]
        outer: int
        start: _common_pb2.Tree
        momentum: _common_pb2.Tree
        deltas: _containers.RepeatedCompositeFieldContainer[Delta]
        checkpoint: Checkpoint
        derivation: _containers.RepeatedCompositeFieldContainer[TrainOrder.Merge]
        derived: bool
        heldout: _common_pb2.Blob
        def __init__(self, outer: _Optional[int] = ..., start: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., momentum: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., derivation: _Optional[_Iterable[_Union[TrainOrder.Merge, _Mapping]]] = ..., derived: bool = ..., heldout: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    REPLAY_SHARE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    attempt: int
    base: _common_pb2.Base
    adapter: _common_pb2.Tree
    dataset: _common_pb2.Blob
    training: _common_pb2.Training
    seed: int
    round: int
    replay: _containers.RepeatedCompositeFieldContainer[_common_pb2.Blob]
    replay_share: float
    canary: str
    slice: TrainOrder.Slice
    merge: TrainOrder.Merge
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., attempt: _Optional[int] = ..., base: _Optional[_Union[_common_pb2.Base, _Mapping]] = ..., adapter: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., dataset: _Optional[_Union[_common_pb2.Blob, _Mapping]] = ..., training: _Optional[_Union[_common_pb2.Training, _Mapping]] = ..., seed: _Optional[int] = ..., round: _Optional[int] = ..., replay: _Optional[_Iterable[_Union[_common_pb2.Blob, _Mapping]]] = ..., replay_share: _Optional[float] = ..., canary: _Optional[str] = ..., slice: _Optional[_Union[TrainOrder.Slice, _Mapping]] = ..., merge: _Optional[_Union[TrainOrder.Merge, _Mapping]] = ...) -> None: ...

class SlicePlan(_message.Message):
    __slots__ = ("cycle", "outer", "slices")
    class Slice(_message.Message):
        __slots__ = ("first", "steps", "agent", "state")
        FIRST_FIELD_NUMBER: _ClassVar[int]
        STEPS_FIELD_NUMBER: _ClassVar[int]
        AGENT_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        first: int
        steps: int
        agent: str
        state: str
        def __init__(self, first: _Optional[int] = ..., steps: _Optional[int] = ..., agent: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    outer: int
    slices: _containers.RepeatedCompositeFieldContainer[SlicePlan.Slice]
    def __init__(self, cycle: _Optional[int] = ..., outer: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[SlicePlan.Slice, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("run", "cycle", "outer", "slice", "agent", "engine", "start", "tree", "first", "steps", "total_steps", "state", "tokens", "trained_tokens", "loss", "learning_rate", "grad_norm", "grad_norm_max", "packing", "wall_s", "skipped", "bytes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_MAX_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    outer: int
    slice: int
    agent: str
    engine: str
    start: str
    tree: _common_pb2.Tree
    first: int
    steps: int
    total_steps: int
    state: str
    tokens: int
    trained_tokens: int
    loss: float
    learning_rate: float
    grad_norm: float
    grad_norm_max: float
    packing: float
    wall_s: float
    skipped: int
    bytes: int
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., outer: _Optional[int] = ..., slice: _Optional[int] = ..., agent: _Optional[str] = ..., engine: _Optional[str] = ..., start: _Optional[str] = ..., tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., first: _Optional[int] = ..., steps: _Optional[int] = ..., total_steps: _Optional[int] = ..., state: _Optional[str] = ..., tokens: _Optional[int] = ..., trained_tokens: _Optional[int] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., grad_norm: _Optional[float] = ..., grad_norm_max: _Optional[float] = ..., packing: _Optional[float] = ..., wall_s: _Optional[float] = ..., skipped: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class SliceClose(_message.Message):
    __slots__ = ("cycle", "outer", "slices")
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    outer: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cycle: _Optional[int] = ..., outer: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ...) -> None: ...

class Merge(_message.Message):
    __slots__ = ("run", "cycle", "outer", "agent", "start", "deltas", "tree", "momentum", "drift", "wall_s", "residual", "derived", "kept", "heldout_nll", "total_steps")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_NLL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    outer: int
    agent: str
    start: str
    deltas: _containers.RepeatedScalarFieldContainer[str]
    tree: _common_pb2.Tree
    momentum: _common_pb2.Tree
    drift: float
    wall_s: float
    residual: float
    derived: bool
    kept: _containers.RepeatedScalarFieldContainer[int]
    heldout_nll: float
    total_steps: int
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., outer: _Optional[int] = ..., agent: _Optional[str] = ..., start: _Optional[str] = ..., deltas: _Optional[_Iterable[str]] = ..., tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., momentum: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., drift: _Optional[float] = ..., wall_s: _Optional[float] = ..., residual: _Optional[float] = ..., derived: bool = ..., kept: _Optional[_Iterable[int]] = ..., heldout_nll: _Optional[float] = ..., total_steps: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("run", "cycle", "step", "steps", "final", "content", "tree", "base", "parent", "loss", "learning_rate", "tokens", "wall_s", "agent", "resume", "engine", "grad_norm", "grad_norm_max", "weight_change", "trained_tokens", "packing", "skipped", "canary", "weighting", "peak_memory_bytes")
    class Content(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONTENT_UNSPECIFIED: _ClassVar[Checkpoint.Content]
        MODEL: _ClassVar[Checkpoint.Content]
        ADAPTER: _ClassVar[Checkpoint.Content]
    CONTENT_UNSPECIFIED: Checkpoint.Content
    MODEL: Checkpoint.Content
    ADAPTER: Checkpoint.Content
    class Weighting(_message.Message):
        __slots__ = ("tokens", "dropped", "clipped", "ratio", "drift", "divergence", "ratios")
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        DROPPED_FIELD_NUMBER: _ClassVar[int]
        CLIPPED_FIELD_NUMBER: _ClassVar[int]
        RATIO_FIELD_NUMBER: _ClassVar[int]
        DRIFT_FIELD_NUMBER: _ClassVar[int]
        DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
        RATIOS_FIELD_NUMBER: _ClassVar[int]
        tokens: int
        dropped: int
        clipped: int
        ratio: float
        drift: float
        divergence: float
        ratios: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, tokens: _Optional[int] = ..., dropped: _Optional[int] = ..., clipped: _Optional[int] = ..., ratio: _Optional[float] = ..., drift: _Optional[float] = ..., divergence: _Optional[float] = ..., ratios: _Optional[_Iterable[int]] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_MAX_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_CHANGE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTING_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    step: int
    steps: int
    final: bool
    content: Checkpoint.Content
    tree: _common_pb2.Tree
    base: _common_pb2.Tree
    parent: _common_pb2.Tree
    loss: float
    learning_rate: float
    tokens: int
    wall_s: float
    agent: str
    resume: _common_pb2.Tree
    engine: str
    grad_norm: float
    grad_norm_max: float
    weight_change: float
    trained_tokens: int
    packing: float
    skipped: int
    canary: _containers.RepeatedScalarFieldContainer[float]
    weighting: Checkpoint.Weighting
    peak_memory_bytes: int
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., final: bool = ..., content: _Optional[_Union[Checkpoint.Content, str]] = ..., tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., base: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., parent: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., tokens: _Optional[int] = ..., wall_s: _Optional[float] = ..., agent: _Optional[str] = ..., resume: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., engine: _Optional[str] = ..., grad_norm: _Optional[float] = ..., grad_norm_max: _Optional[float] = ..., weight_change: _Optional[float] = ..., trained_tokens: _Optional[int] = ..., packing: _Optional[float] = ..., skipped: _Optional[int] = ..., canary: _Optional[_Iterable[float]] = ..., weighting: _Optional[_Union[Checkpoint.Weighting, _Mapping]] = ..., peak_memory_bytes: _Optional[int] = ...) -> None: ...

class Eval(_message.Message):
    __slots__ = ("run", "cycle", "step", "suite", "manifest", "mean_nll", "perplexity", "stderr", "bits_per_byte", "tokens", "chunks", "engine", "agent", "process", "protocol", "n_ctx", "stride", "tokenizer", "text", "canary", "shootdowns")
    class Process(_message.Message):
        __slots__ = ("wall_s", "cpu_s", "peak_rss_bytes", "minor_faults", "major_faults", "tlb_shootdowns")
        WALL_S_FIELD_NUMBER: _ClassVar[int]
        CPU_S_FIELD_NUMBER: _ClassVar[int]
        PEAK_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
        MINOR_FAULTS_FIELD_NUMBER: _ClassVar[int]
        MAJOR_FAULTS_FIELD_NUMBER: _ClassVar[int]
        TLB_SHOOTDOWNS_FIELD_NUMBER: _ClassVar[int]
        wall_s: float
        cpu_s: float
        peak_rss_bytes: int
        minor_faults: int
        major_faults: int
        tlb_shootdowns: int
        def __init__(self, wall_s: _Optional[float] = ..., cpu_s: _Optional[float] = ..., peak_rss_bytes: _Optional[int] = ..., minor_faults: _Optional[int] = ..., major_faults: _Optional[int] = ..., tlb_shootdowns: _Optional[int] = ...) -> None: ...
    class Shootdowns(_message.Message):
        __slots__ = ("mean_per_s", "peak_per_s", "stormed")
        MEAN_PER_S_FIELD_NUMBER: _ClassVar[int]
        PEAK_PER_S_FIELD_NUMBER: _ClassVar[int]
        STORMED_FIELD_NUMBER: _ClassVar[int]
        mean_per_s: float
        peak_per_s: float
        stormed: bool
        def __init__(self, mean_per_s: _Optional[float] = ..., peak_per_s: _Optional[float] = ..., stormed: bool = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MEAN_NLL_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    BITS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    N_CTX_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    SHOOTDOWNS_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    step: int
    suite: str
    manifest: str
    mean_nll: float
    perplexity: float
    stderr: float
    bits_per_byte: float
    tokens: int
    chunks: int
    engine: str
    agent: str
    process: Eval.Process
    protocol: str
    n_ctx: int
    stride: int
    tokenizer: str
    text: str
    canary: float
    shootdowns: Eval.Shootdowns
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., step: _Optional[int] = ..., suite: _Optional[str] = ..., manifest: _Optional[str] = ..., mean_nll: _Optional[float] = ..., perplexity: _Optional[float] = ..., stderr: _Optional[float] = ..., bits_per_byte: _Optional[float] = ..., tokens: _Optional[int] = ..., chunks: _Optional[int] = ..., engine: _Optional[str] = ..., agent: _Optional[str] = ..., process: _Optional[_Union[Eval.Process, _Mapping]] = ..., protocol: _Optional[str] = ..., n_ctx: _Optional[int] = ..., stride: _Optional[int] = ..., tokenizer: _Optional[str] = ..., text: _Optional[str] = ..., canary: _Optional[float] = ..., shootdowns: _Optional[_Union[Eval.Shootdowns, _Mapping]] = ...) -> None: ...

class PassRates(_message.Message):
    __slots__ = ("run", "cycle", "step", "manifest", "heldout", "pass_at", "suites")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_FIELD_NUMBER: _ClassVar[int]
    SUITES_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    step: int
    manifest: str
    heldout: CycleDone.Rate
    pass_at: _containers.RepeatedCompositeFieldContainer[CycleDone.PassAt]
    suites: _containers.RepeatedCompositeFieldContainer[CycleDone.SuiteRate]
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., step: _Optional[int] = ..., manifest: _Optional[str] = ..., heldout: _Optional[_Union[CycleDone.Rate, _Mapping]] = ..., pass_at: _Optional[_Iterable[_Union[CycleDone.PassAt, _Mapping]]] = ..., suites: _Optional[_Iterable[_Union[CycleDone.SuiteRate, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("run", "kind", "id", "attempt", "agent", "message", "log_tail", "final", "cause", "agents")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[Failure.Cause]
        WORK: _ClassVar[Failure.Cause]
        SURROUNDINGS: _ClassVar[Failure.Cause]
    CAUSE_UNSPECIFIED: Failure.Cause
    WORK: Failure.Cause
    SURROUNDINGS: Failure.Cause
    RUN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    kind: str
    id: str
    attempt: int
    agent: str
    message: str
    log_tail: str
    final: bool
    cause: Failure.Cause
    agents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., kind: _Optional[str] = ..., id: _Optional[str] = ..., attempt: _Optional[int] = ..., agent: _Optional[str] = ..., message: _Optional[str] = ..., log_tail: _Optional[str] = ..., final: bool = ..., cause: _Optional[_Union[Failure.Cause, str]] = ..., agents: _Optional[_Iterable[str]] = ...) -> None: ...

class CycleDone(_message.Message):
    __slots__ = ("cycle", "sampled", "kept", "heldout", "train", "generate_s", "verify_s", "train_s", "eval_s", "samples_by_agent", "set_aside", "joules", "metered", "pass_at", "findings", "best", "then", "suites")
    class SamplesByAgentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PassAt(_message.Message):
        __slots__ = ("k", "mean", "low", "high")
        K_FIELD_NUMBER: _ClassVar[int]
        MEAN_FIELD_NUMBER: _ClassVar[int]
        LOW_FIELD_NUMBER: _ClassVar[int]
        HIGH_FIELD_NUMBER: _ClassVar[int]
        k: int
        mean: float
        low: float
        high: float
        def __init__(self, k: _Optional[int] = ..., mean: _Optional[float] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...
    class SuiteRate(_message.Message):
        __slots__ = ("suite", "rate", "pass_at")
        SUITE_FIELD_NUMBER: _ClassVar[int]
        RATE_FIELD_NUMBER: _ClassVar[int]
        PASS_AT_FIELD_NUMBER: _ClassVar[int]
        suite: str
        rate: CycleDone.Rate
        pass_at: _containers.RepeatedCompositeFieldContainer[CycleDone.PassAt]
        def __init__(self, suite: _Optional[str] = ..., rate: _Optional[_Union[CycleDone.Rate, _Mapping]] = ..., pass_at: _Optional[_Iterable[_Union[CycleDone.PassAt, _Mapping]]] = ...) -> None: ...
    class Finding(_message.Message):
        __slots__ = ("gate", "value", "best", "limit", "then")
        GATE_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        BEST_FIELD_NUMBER: _ClassVar[int]
        LIMIT_FIELD_NUMBER: _ClassVar[int]
        THEN_FIELD_NUMBER: _ClassVar[int]
        gate: str
        value: float
        best: float
        limit: float
        then: _common_pb2.Gates.Then
        def __init__(self, gate: _Optional[str] = ..., value: _Optional[float] = ..., best: _Optional[float] = ..., limit: _Optional[float] = ..., then: _Optional[_Union[_common_pb2.Gates.Then, str]] = ...) -> None: ...
    class Rate(_message.Message):
        __slots__ = ("mean", "stderr", "prompts", "samples")
        MEAN_FIELD_NUMBER: _ClassVar[int]
        STDERR_FIELD_NUMBER: _ClassVar[int]
        PROMPTS_FIELD_NUMBER: _ClassVar[int]
        SAMPLES_FIELD_NUMBER: _ClassVar[int]
        mean: float
        stderr: float
        prompts: int
        samples: int
        def __init__(self, mean: _Optional[float] = ..., stderr: _Optional[float] = ..., prompts: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    TRAIN_S_FIELD_NUMBER: _ClassVar[int]
    EVAL_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_BY_AGENT_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    METERED_FIELD_NUMBER: _ClassVar[int]
    PASS_AT_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    THEN_FIELD_NUMBER: _ClassVar[int]
    SUITES_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    sampled: int
    kept: int
    heldout: CycleDone.Rate
    train: CycleDone.Rate
    generate_s: float
    verify_s: float
    train_s: float
    eval_s: float
    samples_by_agent: _containers.ScalarMap[str, int]
    set_aside: int
    joules: float
    metered: int
    pass_at: _containers.RepeatedCompositeFieldContainer[CycleDone.PassAt]
    findings: _containers.RepeatedCompositeFieldContainer[CycleDone.Finding]
    best: int
    then: _common_pb2.Gates.Then
    suites: _containers.RepeatedCompositeFieldContainer[CycleDone.SuiteRate]
    def __init__(self, cycle: _Optional[int] = ..., sampled: _Optional[int] = ..., kept: _Optional[int] = ..., heldout: _Optional[_Union[CycleDone.Rate, _Mapping]] = ..., train: _Optional[_Union[CycleDone.Rate, _Mapping]] = ..., generate_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., train_s: _Optional[float] = ..., eval_s: _Optional[float] = ..., samples_by_agent: _Optional[_Mapping[str, int]] = ..., set_aside: _Optional[int] = ..., joules: _Optional[float] = ..., metered: _Optional[int] = ..., pass_at: _Optional[_Iterable[_Union[CycleDone.PassAt, _Mapping]]] = ..., findings: _Optional[_Iterable[_Union[CycleDone.Finding, _Mapping]]] = ..., best: _Optional[int] = ..., then: _Optional[_Union[_common_pb2.Gates.Then, str]] = ..., suites: _Optional[_Iterable[_Union[CycleDone.SuiteRate, _Mapping]]] = ...) -> None: ...

class Archived(_message.Message):
    __slots__ = ("cycle", "tree", "records")
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    tree: _common_pb2.Tree
    records: int
    def __init__(self, cycle: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., records: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("status", "message")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Done.Status]
        SUCCEEDED: _ClassVar[Done.Status]
        FAILED: _ClassVar[Done.Status]
        CANCELLED: _ClassVar[Done.Status]
    STATUS_UNSPECIFIED: Done.Status
    SUCCEEDED: Done.Status
    FAILED: Done.Status
    CANCELLED: Done.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: Done.Status
    message: str
    def __init__(self, status: _Optional[_Union[Done.Status, str]] = ..., message: _Optional[str] = ...) -> None: ...
