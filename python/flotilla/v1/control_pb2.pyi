import datetime

from flotilla.v1 import board_pb2 as _board_pb2
from flotilla.v1 import facts_pb2 as _facts_pb2
from flotilla.v1 import fleet_pb2 as _fleet_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("spec_yaml", "files", "check_only", "forecast")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    SPEC_YAML_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CHECK_ONLY_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    spec_yaml: str
    files: _containers.ScalarMap[str, bytes]
    check_only: bool
    forecast: ForecastRequest
    def __init__(self, spec_yaml: _Optional[str] = ..., files: _Optional[_Mapping[str, bytes]] = ..., check_only: bool = ..., forecast: _Optional[_Union[ForecastRequest, _Mapping]] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("run", "data", "runs", "forecast")
    RUN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    run: str
    data: DataReport
    runs: _containers.RepeatedScalarFieldContainer[str]
    forecast: Forecast
    def __init__(self, run: _Optional[str] = ..., data: _Optional[_Union[DataReport, _Mapping]] = ..., runs: _Optional[_Iterable[str]] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ...) -> None: ...

class ForecastRequest(_message.Message):
    __slots__ = ("by", "price_per_kwh")
    BY_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    by: _timestamp_pb2.Timestamp
    price_per_kwh: float
    def __init__(self, by: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., price_per_kwh: _Optional[float] = ...) -> None: ...

class Forecast(_message.Message):
    __slots__ = ("seconds", "watt_hours", "price", "probability", "sampling_s", "training_s", "evaluation_s", "memory", "assumed", "runs")
    class Range(_message.Message):
        __slots__ = ("low", "median", "high")
        LOW_FIELD_NUMBER: _ClassVar[int]
        MEDIAN_FIELD_NUMBER: _ClassVar[int]
        HIGH_FIELD_NUMBER: _ClassVar[int]
        low: float
        median: float
        high: float
        def __init__(self, low: _Optional[float] = ..., median: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...
    class Memory(_message.Message):
        __slots__ = ("agent", "needed_bytes", "available_bytes", "used_bytes")
        AGENT_FIELD_NUMBER: _ClassVar[int]
        NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
        AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
        USED_BYTES_FIELD_NUMBER: _ClassVar[int]
        agent: str
        needed_bytes: int
        available_bytes: int
        used_bytes: int
        def __init__(self, agent: _Optional[str] = ..., needed_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ...) -> None: ...
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WATT_HOURS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    TRAINING_S_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    seconds: Forecast.Range
    watt_hours: Forecast.Range
    price: Forecast.Range
    probability: float
    sampling_s: float
    training_s: float
    evaluation_s: float
    memory: _containers.RepeatedCompositeFieldContainer[Forecast.Memory]
    assumed: _containers.RepeatedScalarFieldContainer[str]
    runs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, seconds: _Optional[_Union[Forecast.Range, _Mapping]] = ..., watt_hours: _Optional[_Union[Forecast.Range, _Mapping]] = ..., price: _Optional[_Union[Forecast.Range, _Mapping]] = ..., probability: _Optional[float] = ..., sampling_s: _Optional[float] = ..., training_s: _Optional[float] = ..., evaluation_s: _Optional[float] = ..., memory: _Optional[_Iterable[_Union[Forecast.Memory, _Mapping]]] = ..., assumed: _Optional[_Iterable[str]] = ..., runs: _Optional[_Iterable[str]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("run", "cycle", "settings", "name")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    settings: _containers.RepeatedScalarFieldContainer[str]
    name: str
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., settings: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class DataReport(_message.Message):
    __slots__ = ("files", "samples_per_cycle", "heldout_samples_per_cycle", "warnings", "token_logprob_bytes", "sweep_runs")
    FILES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_CYCLE_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_SAMPLES_PER_CYCLE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOGPROB_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWEEP_RUNS_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[DataFile]
    samples_per_cycle: int
    heldout_samples_per_cycle: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    token_logprob_bytes: int
    sweep_runs: int
    def __init__(self, files: _Optional[_Iterable[_Union[DataFile, _Mapping]]] = ..., samples_per_cycle: _Optional[int] = ..., heldout_samples_per_cycle: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., token_logprob_bytes: _Optional[int] = ..., sweep_runs: _Optional[int] = ...) -> None: ...

class DataFile(_message.Message):
    __slots__ = ("field", "file", "lines", "rendered", "duplicates", "fields", "prompt_bytes", "completion_bytes", "prompt_tokens", "shapes")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class Lengths(_message.Message):
        __slots__ = ("min", "median", "p95", "max")
        MIN_FIELD_NUMBER: _ClassVar[int]
        MEDIAN_FIELD_NUMBER: _ClassVar[int]
        P95_FIELD_NUMBER: _ClassVar[int]
        MAX_FIELD_NUMBER: _ClassVar[int]
        min: int
        median: int
        p95: int
        max: int
        def __init__(self, min: _Optional[int] = ..., median: _Optional[int] = ..., p95: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...
    FIELD_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    RENDERED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    field: str
    file: str
    lines: int
    rendered: int
    duplicates: int
    fields: _containers.ScalarMap[str, int]
    prompt_bytes: DataFile.Lengths
    completion_bytes: DataFile.Lengths
    prompt_tokens: DataFile.Lengths
    shapes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, field: _Optional[str] = ..., file: _Optional[str] = ..., lines: _Optional[int] = ..., rendered: _Optional[int] = ..., duplicates: _Optional[int] = ..., fields: _Optional[_Mapping[str, int]] = ..., prompt_bytes: _Optional[_Union[DataFile.Lengths, _Mapping]] = ..., completion_bytes: _Optional[_Union[DataFile.Lengths, _Mapping]] = ..., prompt_tokens: _Optional[_Union[DataFile.Lengths, _Mapping]] = ..., shapes: _Optional[_Iterable[str]] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("run", "name", "kind", "state", "message", "seed", "submitted_at", "ended_at", "cycle", "cycles", "phase", "cycles_done", "checkpoints", "evals", "failures", "cursor", "forked_from", "trial_of", "pool", "user", "queue", "queue_place", "sweep", "data_sources")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Run.State]
        RUNNING: _ClassVar[Run.State]
        PAUSED: _ClassVar[Run.State]
        SUCCEEDED: _ClassVar[Run.State]
        FAILED: _ClassVar[Run.State]
        CANCELLED: _ClassVar[Run.State]
        QUEUED: _ClassVar[Run.State]
    STATE_UNSPECIFIED: Run.State
    RUNNING: Run.State
    PAUSED: Run.State
    SUCCEEDED: Run.State
    FAILED: Run.State
    CANCELLED: Run.State
    QUEUED: Run.State
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    CYCLES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CYCLES_DONE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    EVALS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_FIELD_NUMBER: _ClassVar[int]
    TRIAL_OF_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PLACE_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCES_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    kind: str
    state: Run.State
    message: str
    seed: int
    submitted_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    cycle: int
    cycles: int
    phase: str
    cycles_done: _containers.RepeatedCompositeFieldContainer[_facts_pb2.CycleDone]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    evals: _containers.RepeatedCompositeFieldContainer[_facts_pb2.Eval]
    failures: _containers.RepeatedCompositeFieldContainer[_facts_pb2.Failure]
    cursor: int
    forked_from: str
    trial_of: str
    pool: str
    user: str
    queue: _facts_pb2.Spec.Queue
    queue_place: int
    sweep: _facts_pb2.Spec.Sweep
    data_sources: _containers.RepeatedCompositeFieldContainer[_facts_pb2.Spec.DataSource]
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[_Union[Run.State, str]] = ..., message: _Optional[str] = ..., seed: _Optional[int] = ..., submitted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cycle: _Optional[int] = ..., cycles: _Optional[int] = ..., phase: _Optional[str] = ..., cycles_done: _Optional[_Iterable[_Union[_facts_pb2.CycleDone, _Mapping]]] = ..., checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ..., evals: _Optional[_Iterable[_Union[_facts_pb2.Eval, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[_facts_pb2.Failure, _Mapping]]] = ..., cursor: _Optional[int] = ..., forked_from: _Optional[str] = ..., trial_of: _Optional[str] = ..., pool: _Optional[str] = ..., user: _Optional[str] = ..., queue: _Optional[_Union[_facts_pb2.Spec.Queue, _Mapping]] = ..., queue_place: _Optional[int] = ..., sweep: _Optional[_Union[_facts_pb2.Spec.Sweep, _Mapping]] = ..., data_sources: _Optional[_Iterable[_Union[_facts_pb2.Spec.DataSource, _Mapping]]] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("run", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    reason: str
    def __init__(self, run: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ControlResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("run", "no_store")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    run: str
    no_store: bool
    def __init__(self, run: _Optional[str] = ..., no_store: bool = ...) -> None: ...

class AuditReport(_message.Message):
    __slots__ = ("facts", "planned_samples", "accepted_samples", "judged_samples", "kept_samples", "checkpoints", "evals", "checked", "not_checked", "findings", "findings_left_out")
    class Finding(_message.Message):
        __slots__ = ("where", "what", "subject", "sequence", "url", "expected", "found")
        WHERE_FIELD_NUMBER: _ClassVar[int]
        WHAT_FIELD_NUMBER: _ClassVar[int]
        SUBJECT_FIELD_NUMBER: _ClassVar[int]
        SEQUENCE_FIELD_NUMBER: _ClassVar[int]
        URL_FIELD_NUMBER: _ClassVar[int]
        EXPECTED_FIELD_NUMBER: _ClassVar[int]
        FOUND_FIELD_NUMBER: _ClassVar[int]
        where: str
        what: str
        subject: str
        sequence: int
        url: str
        expected: str
        found: str
        def __init__(self, where: _Optional[str] = ..., what: _Optional[str] = ..., subject: _Optional[str] = ..., sequence: _Optional[int] = ..., url: _Optional[str] = ..., expected: _Optional[str] = ..., found: _Optional[str] = ...) -> None: ...
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    JUDGED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    KEPT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    EVALS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    NOT_CHECKED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    facts: int
    planned_samples: int
    accepted_samples: int
    judged_samples: int
    kept_samples: int
    checkpoints: int
    evals: int
    checked: _containers.RepeatedScalarFieldContainer[str]
    not_checked: _containers.RepeatedScalarFieldContainer[str]
    findings: _containers.RepeatedCompositeFieldContainer[AuditReport.Finding]
    findings_left_out: int
    def __init__(self, facts: _Optional[int] = ..., planned_samples: _Optional[int] = ..., accepted_samples: _Optional[int] = ..., judged_samples: _Optional[int] = ..., kept_samples: _Optional[int] = ..., checkpoints: _Optional[int] = ..., evals: _Optional[int] = ..., checked: _Optional[_Iterable[str]] = ..., not_checked: _Optional[_Iterable[str]] = ..., findings: _Optional[_Iterable[_Union[AuditReport.Finding, _Mapping]]] = ..., findings_left_out: _Optional[int] = ...) -> None: ...

class WatchRunRequest(_message.Message):
    __slots__ = ("run", "after")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    after: int
    def __init__(self, run: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("cursor", "at", "subject", "json", "author")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    at: _timestamp_pb2.Timestamp
    subject: str
    json: str
    author: str
    def __init__(self, cursor: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., subject: _Optional[str] = ..., json: _Optional[str] = ..., author: _Optional[str] = ...) -> None: ...

class BoardRequest(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, runs: _Optional[_Iterable[str]] = ...) -> None: ...

class EvalFilter(_message.Message):
    __slots__ = ("run", "suite")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    run: str
    suite: str
    def __init__(self, run: _Optional[str] = ..., suite: _Optional[str] = ...) -> None: ...

class EvalHistory(_message.Message):
    __slots__ = ("evals",)
    EVALS_FIELD_NUMBER: _ClassVar[int]
    evals: _containers.RepeatedCompositeFieldContainer[EvalEvent]
    def __init__(self, evals: _Optional[_Iterable[_Union[EvalEvent, _Mapping]]] = ...) -> None: ...

class WatchEvalsRequest(_message.Message):
    __slots__ = ("filter", "after")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    filter: EvalFilter
    after: int
    def __init__(self, filter: _Optional[_Union[EvalFilter, _Mapping]] = ..., after: _Optional[int] = ...) -> None: ...

class EvalEvent(_message.Message):
    __slots__ = ("cursor", "at", "eval", "pass_rates")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    EVAL_FIELD_NUMBER: _ClassVar[int]
    PASS_RATES_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    at: _timestamp_pb2.Timestamp
    eval: _facts_pb2.Eval
    pass_rates: _facts_pb2.PassRates
    def __init__(self, cursor: _Optional[int] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., eval: _Optional[_Union[_facts_pb2.Eval, _Mapping]] = ..., pass_rates: _Optional[_Union[_facts_pb2.PassRates, _Mapping]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ...) -> None: ...

class CheckpointRef(_message.Message):
    __slots__ = ("run", "cycle", "step", "newest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    step: int
    newest: bool
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., step: _Optional[int] = ..., newest: bool = ...) -> None: ...

class CheckpointInfo(_message.Message):
    __slots__ = ("checkpoint", "files", "at", "best", "newest", "pass_rate", "perplexities", "removed")
    class SuitePerplexity(_message.Message):
        __slots__ = ("suite", "perplexity")
        SUITE_FIELD_NUMBER: _ClassVar[int]
        PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
        suite: str
        perplexity: float
        def __init__(self, suite: _Optional[str] = ..., perplexity: _Optional[float] = ...) -> None: ...
    class File(_message.Message):
        __slots__ = ("path", "bytes", "digest")
        PATH_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        path: str
        bytes: int
        digest: str
        def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    PASS_RATE_FIELD_NUMBER: _ClassVar[int]
    PERPLEXITIES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _facts_pb2.Checkpoint
    files: _containers.RepeatedCompositeFieldContainer[CheckpointInfo.File]
    at: _timestamp_pb2.Timestamp
    best: bool
    newest: bool
    pass_rate: float
    perplexities: _containers.RepeatedCompositeFieldContainer[CheckpointInfo.SuitePerplexity]
    removed: bool
    def __init__(self, checkpoint: _Optional[_Union[_facts_pb2.Checkpoint, _Mapping]] = ..., files: _Optional[_Iterable[_Union[CheckpointInfo.File, _Mapping]]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., best: bool = ..., newest: bool = ..., pass_rate: _Optional[float] = ..., perplexities: _Optional[_Iterable[_Union[CheckpointInfo.SuitePerplexity, _Mapping]]] = ..., removed: bool = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("checkpoint", "path")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    checkpoint: CheckpointRef
    path: str
    def __init__(self, checkpoint: _Optional[_Union[CheckpointRef, _Mapping]] = ..., path: _Optional[str] = ...) -> None: ...

class DownloadChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class CompareRequest(_message.Message):
    __slots__ = ("a", "b", "suite", "alpha")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    a: CheckpointRef
    b: CheckpointRef
    suite: str
    alpha: float
    def __init__(self, a: _Optional[_Union[CheckpointRef, _Mapping]] = ..., b: _Optional[_Union[CheckpointRef, _Mapping]] = ..., suite: _Optional[str] = ..., alpha: _Optional[float] = ...) -> None: ...

class Comparison(_message.Message):
    __slots__ = ("decision", "at", "p", "difference", "interval", "mean_a", "mean_b", "pairs", "unpaired", "a", "b", "categories", "alpha")
    class Side(_message.Message):
        __slots__ = ("run", "cycle", "mean_tokens", "perplexities", "pass_rate")
        class PerplexitiesEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: float
            def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
        RUN_FIELD_NUMBER: _ClassVar[int]
        CYCLE_FIELD_NUMBER: _ClassVar[int]
        MEAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
        PERPLEXITIES_FIELD_NUMBER: _ClassVar[int]
        PASS_RATE_FIELD_NUMBER: _ClassVar[int]
        run: str
        cycle: int
        mean_tokens: float
        perplexities: _containers.ScalarMap[str, float]
        pass_rate: float
        def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., mean_tokens: _Optional[float] = ..., perplexities: _Optional[_Mapping[str, float]] = ..., pass_rate: _Optional[float] = ...) -> None: ...
    class Category(_message.Message):
        __slots__ = ("category", "pairs", "mean_a", "mean_b")
        CATEGORY_FIELD_NUMBER: _ClassVar[int]
        PAIRS_FIELD_NUMBER: _ClassVar[int]
        MEAN_A_FIELD_NUMBER: _ClassVar[int]
        MEAN_B_FIELD_NUMBER: _ClassVar[int]
        category: str
        pairs: int
        mean_a: float
        mean_b: float
        def __init__(self, category: _Optional[str] = ..., pairs: _Optional[int] = ..., mean_a: _Optional[float] = ..., mean_b: _Optional[float] = ...) -> None: ...
    DECISION_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    P_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MEAN_A_FIELD_NUMBER: _ClassVar[int]
    MEAN_B_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    UNPAIRED_FIELD_NUMBER: _ClassVar[int]
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    decision: str
    at: int
    p: float
    difference: float
    interval: _containers.RepeatedScalarFieldContainer[float]
    mean_a: float
    mean_b: float
    pairs: int
    unpaired: int
    a: Comparison.Side
    b: Comparison.Side
    categories: _containers.RepeatedCompositeFieldContainer[Comparison.Category]
    alpha: float
    def __init__(self, decision: _Optional[str] = ..., at: _Optional[int] = ..., p: _Optional[float] = ..., difference: _Optional[float] = ..., interval: _Optional[_Iterable[float]] = ..., mean_a: _Optional[float] = ..., mean_b: _Optional[float] = ..., pairs: _Optional[int] = ..., unpaired: _Optional[int] = ..., a: _Optional[_Union[Comparison.Side, _Mapping]] = ..., b: _Optional[_Union[Comparison.Side, _Mapping]] = ..., categories: _Optional[_Iterable[_Union[Comparison.Category, _Mapping]]] = ..., alpha: _Optional[float] = ...) -> None: ...

class ListChannelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListChannelsResponse(_message.Message):
    __slots__ = ("channels",)
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    channels: _containers.RepeatedCompositeFieldContainer[Channel]
    def __init__(self, channels: _Optional[_Iterable[_Union[Channel, _Mapping]]] = ...) -> None: ...

class ChannelRequest(_message.Message):
    __slots__ = ("channel",)
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    channel: str
    def __init__(self, channel: _Optional[str] = ...) -> None: ...

class ChannelHistory(_message.Message):
    __slots__ = ("moves", "roll_back_to")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    ROLL_BACK_TO_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[Channel]
    roll_back_to: int
    def __init__(self, moves: _Optional[_Iterable[_Union[Channel, _Mapping]]] = ..., roll_back_to: _Optional[int] = ...) -> None: ...

class MoveChannelRequest(_message.Message):
    __slots__ = ("channel", "checkpoint", "serving", "stop_serving", "reason", "if_better", "base", "keep_days", "auto_roll_back", "forget")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    STOP_SERVING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IF_BETTER_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEEP_DAYS_FIELD_NUMBER: _ClassVar[int]
    AUTO_ROLL_BACK_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    channel: str
    checkpoint: CheckpointRef
    serving: _facts_pb2.ChannelMove.Serving
    stop_serving: bool
    reason: str
    if_better: bool
    base: str
    keep_days: int
    auto_roll_back: bool
    forget: bool
    def __init__(self, channel: _Optional[str] = ..., checkpoint: _Optional[_Union[CheckpointRef, _Mapping]] = ..., serving: _Optional[_Union[_facts_pb2.ChannelMove.Serving, _Mapping]] = ..., stop_serving: bool = ..., reason: _Optional[str] = ..., if_better: bool = ..., base: _Optional[str] = ..., keep_days: _Optional[int] = ..., auto_roll_back: bool = ..., forget: bool = ...) -> None: ...

class LearnRequest(_message.Message):
    __slots__ = ("channel", "spec_yaml", "files", "at_least", "stop")
    class FilesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    SPEC_YAML_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    channel: str
    spec_yaml: str
    files: _containers.ScalarMap[str, bytes]
    at_least: int
    stop: bool
    def __init__(self, channel: _Optional[str] = ..., spec_yaml: _Optional[str] = ..., files: _Optional[_Mapping[str, bytes]] = ..., at_least: _Optional[int] = ..., stop: bool = ...) -> None: ...

class KeptRequest(_message.Message):
    __slots__ = ("channel",)
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    channel: str
    def __init__(self, channel: _Optional[str] = ...) -> None: ...

class KeptExchange(_message.Message):
    __slots__ = ("id", "at", "number", "messages_json", "prompt", "answer", "feedback", "feedback_at")
    class Feedback(_message.Message):
        __slots__ = ("reward", "edit", "comment")
        REWARD_FIELD_NUMBER: _ClassVar[int]
        EDIT_FIELD_NUMBER: _ClassVar[int]
        COMMENT_FIELD_NUMBER: _ClassVar[int]
        reward: float
        edit: str
        comment: str
        def __init__(self, reward: _Optional[float] = ..., edit: _Optional[str] = ..., comment: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_AT_FIELD_NUMBER: _ClassVar[int]
    id: str
    at: _timestamp_pb2.Timestamp
    number: int
    messages_json: str
    prompt: str
    answer: str
    feedback: KeptExchange.Feedback
    feedback_at: int
    def __init__(self, id: _Optional[str] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., number: _Optional[int] = ..., messages_json: _Optional[str] = ..., prompt: _Optional[str] = ..., answer: _Optional[str] = ..., feedback: _Optional[_Union[KeptExchange.Feedback, _Mapping]] = ..., feedback_at: _Optional[int] = ...) -> None: ...

class RollBackRequest(_message.Message):
    __slots__ = ("channel", "reason", "number")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    channel: str
    reason: str
    number: int
    def __init__(self, channel: _Optional[str] = ..., reason: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class Channel(_message.Message):
    __slots__ = ("channel", "number", "move", "at", "agents")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    channel: str
    number: int
    move: _facts_pb2.ChannelMove
    at: _timestamp_pb2.Timestamp
    agents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, channel: _Optional[str] = ..., number: _Optional[int] = ..., move: _Optional[_Union[_facts_pb2.ChannelMove, _Mapping]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., agents: _Optional[_Iterable[str]] = ...) -> None: ...

class AgentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AgentsResponse(_message.Message):
    __slots__ = ("agents",)
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedCompositeFieldContainer[_fleet_pb2.AgentStatus]
    def __init__(self, agents: _Optional[_Iterable[_Union[_fleet_pb2.AgentStatus, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("agent",)
    AGENT_FIELD_NUMBER: _ClassVar[int]
    agent: str
    def __init__(self, agent: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("version", "open", "name", "scope")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    version: str
    open: bool
    name: str
    scope: str
    def __init__(self, version: _Optional[str] = ..., open: bool = ..., name: _Optional[str] = ..., scope: _Optional[str] = ...) -> None: ...
