import datetime

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

class FleetChange(_message.Message):
    __slots__ = ("agents", "runs")
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedCompositeFieldContainer[_fleet_pb2.AgentStatus]
    runs: _containers.RepeatedCompositeFieldContainer[RunLine]
    def __init__(self, agents: _Optional[_Iterable[_Union[_fleet_pb2.AgentStatus, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[RunLine, _Mapping]]] = ...) -> None: ...

class RunLine(_message.Message):
    __slots__ = ("run", "name", "kind", "state", "message", "submitted_at", "ended_at", "cycles_done", "cycles", "heldout", "best_heldout", "best_cycle", "trial_of", "forked_from")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    CYCLES_DONE_FIELD_NUMBER: _ClassVar[int]
    CYCLES_FIELD_NUMBER: _ClassVar[int]
    HELDOUT_FIELD_NUMBER: _ClassVar[int]
    BEST_HELDOUT_FIELD_NUMBER: _ClassVar[int]
    BEST_CYCLE_FIELD_NUMBER: _ClassVar[int]
    TRIAL_OF_FIELD_NUMBER: _ClassVar[int]
    FORKED_FROM_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    kind: str
    state: str
    message: str
    submitted_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    cycles_done: int
    cycles: int
    heldout: _facts_pb2.CycleDone.Rate
    best_heldout: _facts_pb2.CycleDone.Rate
    best_cycle: int
    trial_of: str
    forked_from: str
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ..., message: _Optional[str] = ..., submitted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cycles_done: _Optional[int] = ..., cycles: _Optional[int] = ..., heldout: _Optional[_Union[_facts_pb2.CycleDone.Rate, _Mapping]] = ..., best_heldout: _Optional[_Union[_facts_pb2.CycleDone.Rate, _Mapping]] = ..., best_cycle: _Optional[int] = ..., trial_of: _Optional[str] = ..., forked_from: _Optional[str] = ...) -> None: ...

class Board(_message.Message):
    __slots__ = ("cursor", "head", "cycles", "spec")
    class Head(_message.Message):
        __slots__ = ("run", "name", "kind", "state", "message", "submitted_at", "ended_s", "cycle", "cycles", "phase", "done", "total", "unit", "phase_ends", "run_ends", "troubles", "troubles_in_all", "steered", "at_s")
        RUN_FIELD_NUMBER: _ClassVar[int]
        NAME_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
        ENDED_S_FIELD_NUMBER: _ClassVar[int]
        CYCLE_FIELD_NUMBER: _ClassVar[int]
        CYCLES_FIELD_NUMBER: _ClassVar[int]
        PHASE_FIELD_NUMBER: _ClassVar[int]
        DONE_FIELD_NUMBER: _ClassVar[int]
        TOTAL_FIELD_NUMBER: _ClassVar[int]
        UNIT_FIELD_NUMBER: _ClassVar[int]
        PHASE_ENDS_FIELD_NUMBER: _ClassVar[int]
        RUN_ENDS_FIELD_NUMBER: _ClassVar[int]
        TROUBLES_FIELD_NUMBER: _ClassVar[int]
        TROUBLES_IN_ALL_FIELD_NUMBER: _ClassVar[int]
        STEERED_FIELD_NUMBER: _ClassVar[int]
        AT_S_FIELD_NUMBER: _ClassVar[int]
        run: str
        name: str
        kind: str
        state: str
        message: str
        submitted_at: _timestamp_pb2.Timestamp
        ended_s: float
        cycle: int
        cycles: int
        phase: str
        done: int
        total: int
        unit: str
        phase_ends: Board.Eta
        run_ends: Board.Eta
        troubles: _containers.RepeatedCompositeFieldContainer[Board.Trouble]
        troubles_in_all: int
        steered: _containers.RepeatedCompositeFieldContainer[Board.Steered]
        at_s: float
        def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., kind: _Optional[str] = ..., state: _Optional[str] = ..., message: _Optional[str] = ..., submitted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_s: _Optional[float] = ..., cycle: _Optional[int] = ..., cycles: _Optional[int] = ..., phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., phase_ends: _Optional[_Union[Board.Eta, _Mapping]] = ..., run_ends: _Optional[_Union[Board.Eta, _Mapping]] = ..., troubles: _Optional[_Iterable[_Union[Board.Trouble, _Mapping]]] = ..., troubles_in_all: _Optional[int] = ..., steered: _Optional[_Iterable[_Union[Board.Steered, _Mapping]]] = ..., at_s: _Optional[float] = ...) -> None: ...
    class Eta(_message.Message):
        __slots__ = ("early_s", "likely_s", "late_s")
        EARLY_S_FIELD_NUMBER: _ClassVar[int]
        LIKELY_S_FIELD_NUMBER: _ClassVar[int]
        LATE_S_FIELD_NUMBER: _ClassVar[int]
        early_s: float
        likely_s: float
        late_s: float
        def __init__(self, early_s: _Optional[float] = ..., likely_s: _Optional[float] = ..., late_s: _Optional[float] = ...) -> None: ...
    class Trouble(_message.Message):
        __slots__ = ("at_s", "what", "agent", "message", "final")
        AT_S_FIELD_NUMBER: _ClassVar[int]
        WHAT_FIELD_NUMBER: _ClassVar[int]
        AGENT_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        FINAL_FIELD_NUMBER: _ClassVar[int]
        at_s: float
        what: str
        agent: str
        message: str
        final: bool
        def __init__(self, at_s: _Optional[float] = ..., what: _Optional[str] = ..., agent: _Optional[str] = ..., message: _Optional[str] = ..., final: bool = ...) -> None: ...
    class Steered(_message.Message):
        __slots__ = ("at_s", "action", "reason", "by")
        AT_S_FIELD_NUMBER: _ClassVar[int]
        ACTION_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        BY_FIELD_NUMBER: _ClassVar[int]
        at_s: float
        action: str
        reason: str
        by: str
        def __init__(self, at_s: _Optional[float] = ..., action: _Optional[str] = ..., reason: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...
    class Cycle(_message.Message):
        __slots__ = ("cycle", "train", "heldout", "rewards", "selected", "done", "spans", "checkpoints", "evals")
        CYCLE_FIELD_NUMBER: _ClassVar[int]
        TRAIN_FIELD_NUMBER: _ClassVar[int]
        HELDOUT_FIELD_NUMBER: _ClassVar[int]
        REWARDS_FIELD_NUMBER: _ClassVar[int]
        SELECTED_FIELD_NUMBER: _ClassVar[int]
        DONE_FIELD_NUMBER: _ClassVar[int]
        SPANS_FIELD_NUMBER: _ClassVar[int]
        CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
        EVALS_FIELD_NUMBER: _ClassVar[int]
        cycle: int
        train: Board.Samples
        heldout: Board.Samples
        rewards: Board.Histogram
        selected: Board.Selected
        done: _facts_pb2.CycleDone
        spans: _containers.RepeatedCompositeFieldContainer[Board.Span]
        checkpoints: _containers.RepeatedCompositeFieldContainer[Board.Point]
        evals: _containers.RepeatedCompositeFieldContainer[Board.Figure]
        def __init__(self, cycle: _Optional[int] = ..., train: _Optional[_Union[Board.Samples, _Mapping]] = ..., heldout: _Optional[_Union[Board.Samples, _Mapping]] = ..., rewards: _Optional[_Union[Board.Histogram, _Mapping]] = ..., selected: _Optional[_Union[Board.Selected, _Mapping]] = ..., done: _Optional[_Union[_facts_pb2.CycleDone, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[Board.Span, _Mapping]]] = ..., checkpoints: _Optional[_Iterable[_Union[Board.Point, _Mapping]]] = ..., evals: _Optional[_Iterable[_Union[Board.Figure, _Mapping]]] = ...) -> None: ...
    class Samples(_message.Message):
        __slots__ = ("planned", "drawn", "judged", "passed", "errors")
        PLANNED_FIELD_NUMBER: _ClassVar[int]
        DRAWN_FIELD_NUMBER: _ClassVar[int]
        JUDGED_FIELD_NUMBER: _ClassVar[int]
        PASSED_FIELD_NUMBER: _ClassVar[int]
        ERRORS_FIELD_NUMBER: _ClassVar[int]
        planned: int
        drawn: int
        judged: int
        passed: int
        errors: int
        def __init__(self, planned: _Optional[int] = ..., drawn: _Optional[int] = ..., judged: _Optional[int] = ..., passed: _Optional[int] = ..., errors: _Optional[int] = ...) -> None: ...
    class Histogram(_message.Message):
        __slots__ = ("low", "width", "counts")
        LOW_FIELD_NUMBER: _ClassVar[int]
        WIDTH_FIELD_NUMBER: _ClassVar[int]
        COUNTS_FIELD_NUMBER: _ClassVar[int]
        low: float
        width: float
        counts: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, low: _Optional[float] = ..., width: _Optional[float] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...
    class Selected(_message.Message):
        __slots__ = ("considered", "kept", "dropped", "min_reward", "diversity", "entropy")
        class DroppedEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        CONSIDERED_FIELD_NUMBER: _ClassVar[int]
        KEPT_FIELD_NUMBER: _ClassVar[int]
        DROPPED_FIELD_NUMBER: _ClassVar[int]
        MIN_REWARD_FIELD_NUMBER: _ClassVar[int]
        DIVERSITY_FIELD_NUMBER: _ClassVar[int]
        ENTROPY_FIELD_NUMBER: _ClassVar[int]
        considered: int
        kept: int
        dropped: _containers.ScalarMap[str, int]
        min_reward: float
        diversity: float
        entropy: float
        def __init__(self, considered: _Optional[int] = ..., kept: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ..., min_reward: _Optional[float] = ..., diversity: _Optional[float] = ..., entropy: _Optional[float] = ...) -> None: ...
    class Span(_message.Message):
        __slots__ = ("agent", "work", "begin_s", "end_s", "count", "first_outer_step", "last_outer_step")
        AGENT_FIELD_NUMBER: _ClassVar[int]
        WORK_FIELD_NUMBER: _ClassVar[int]
        BEGIN_S_FIELD_NUMBER: _ClassVar[int]
        END_S_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        FIRST_OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
        LAST_OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
        agent: str
        work: str
        begin_s: float
        end_s: float
        count: int
        first_outer_step: int
        last_outer_step: int
        def __init__(self, agent: _Optional[str] = ..., work: _Optional[str] = ..., begin_s: _Optional[float] = ..., end_s: _Optional[float] = ..., count: _Optional[int] = ..., first_outer_step: _Optional[int] = ..., last_outer_step: _Optional[int] = ...) -> None: ...
    class Point(_message.Message):
        __slots__ = ("step", "steps", "final", "at_s", "loss", "learning_rate", "grad_norm", "weight_change", "tokens", "agent", "engine", "manifest", "parent", "path", "weighting")
        STEP_FIELD_NUMBER: _ClassVar[int]
        STEPS_FIELD_NUMBER: _ClassVar[int]
        FINAL_FIELD_NUMBER: _ClassVar[int]
        AT_S_FIELD_NUMBER: _ClassVar[int]
        LOSS_FIELD_NUMBER: _ClassVar[int]
        LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
        GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_CHANGE_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        AGENT_FIELD_NUMBER: _ClassVar[int]
        ENGINE_FIELD_NUMBER: _ClassVar[int]
        MANIFEST_FIELD_NUMBER: _ClassVar[int]
        PARENT_FIELD_NUMBER: _ClassVar[int]
        PATH_FIELD_NUMBER: _ClassVar[int]
        WEIGHTING_FIELD_NUMBER: _ClassVar[int]
        step: int
        steps: int
        final: bool
        at_s: float
        loss: float
        learning_rate: float
        grad_norm: float
        weight_change: float
        tokens: int
        agent: str
        engine: str
        manifest: str
        parent: str
        path: str
        weighting: _facts_pb2.Checkpoint.Weighting
        def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., final: bool = ..., at_s: _Optional[float] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., grad_norm: _Optional[float] = ..., weight_change: _Optional[float] = ..., tokens: _Optional[int] = ..., agent: _Optional[str] = ..., engine: _Optional[str] = ..., manifest: _Optional[str] = ..., parent: _Optional[str] = ..., path: _Optional[str] = ..., weighting: _Optional[_Union[_facts_pb2.Checkpoint.Weighting, _Mapping]] = ...) -> None: ...
    class Figure(_message.Message):
        __slots__ = ("step", "suite", "perplexity", "stderr", "bits_per_byte", "agent", "engine", "stormed")
        STEP_FIELD_NUMBER: _ClassVar[int]
        SUITE_FIELD_NUMBER: _ClassVar[int]
        PERPLEXITY_FIELD_NUMBER: _ClassVar[int]
        STDERR_FIELD_NUMBER: _ClassVar[int]
        BITS_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
        AGENT_FIELD_NUMBER: _ClassVar[int]
        ENGINE_FIELD_NUMBER: _ClassVar[int]
        STORMED_FIELD_NUMBER: _ClassVar[int]
        step: int
        suite: str
        perplexity: float
        stderr: float
        bits_per_byte: float
        agent: str
        engine: str
        stormed: bool
        def __init__(self, step: _Optional[int] = ..., suite: _Optional[str] = ..., perplexity: _Optional[float] = ..., stderr: _Optional[float] = ..., bits_per_byte: _Optional[float] = ..., agent: _Optional[str] = ..., engine: _Optional[str] = ..., stormed: bool = ...) -> None: ...
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    CYCLES_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    head: Board.Head
    cycles: _containers.RepeatedCompositeFieldContainer[Board.Cycle]
    spec: _facts_pb2.Spec
    def __init__(self, cursor: _Optional[int] = ..., head: _Optional[_Union[Board.Head, _Mapping]] = ..., cycles: _Optional[_Iterable[_Union[Board.Cycle, _Mapping]]] = ..., spec: _Optional[_Union[_facts_pb2.Spec, _Mapping]] = ...) -> None: ...

class SamplesRequest(_message.Message):
    __slots__ = ("run", "cycle", "which", "suite", "fate", "text", "offset", "limit")
    class Which(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WHICH_UNSPECIFIED: _ClassVar[SamplesRequest.Which]
        TRAIN_SAMPLES: _ClassVar[SamplesRequest.Which]
        HELDOUT_SAMPLES: _ClassVar[SamplesRequest.Which]
    WHICH_UNSPECIFIED: SamplesRequest.Which
    TRAIN_SAMPLES: SamplesRequest.Which
    HELDOUT_SAMPLES: SamplesRequest.Which
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    WHICH_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run: str
    cycle: int
    which: SamplesRequest.Which
    suite: str
    fate: str
    text: str
    offset: int
    limit: int
    def __init__(self, run: _Optional[str] = ..., cycle: _Optional[int] = ..., which: _Optional[_Union[SamplesRequest.Which, str]] = ..., suite: _Optional[str] = ..., fate: _Optional[str] = ..., text: _Optional[str] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class SamplesPage(_message.Message):
    __slots__ = ("prompts_in_all", "prompts", "outcomes", "fates", "suites")
    class OutcomesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class Prompt(_message.Message):
        __slots__ = ("prompt_id", "text", "samples", "samples_in_all")
        PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        SAMPLES_FIELD_NUMBER: _ClassVar[int]
        SAMPLES_IN_ALL_FIELD_NUMBER: _ClassVar[int]
        prompt_id: str
        text: str
        samples: _containers.RepeatedCompositeFieldContainer[SamplesPage.Sample]
        samples_in_all: int
        def __init__(self, prompt_id: _Optional[str] = ..., text: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SamplesPage.Sample, _Mapping]]] = ..., samples_in_all: _Optional[int] = ...) -> None: ...
    class Sample(_message.Message):
        __slots__ = ("index", "text", "cut", "tokens", "finish", "logprob", "outcome", "reward", "detail", "fate", "agent", "turns")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        CUT_FIELD_NUMBER: _ClassVar[int]
        TOKENS_FIELD_NUMBER: _ClassVar[int]
        FINISH_FIELD_NUMBER: _ClassVar[int]
        LOGPROB_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        REWARD_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        FATE_FIELD_NUMBER: _ClassVar[int]
        AGENT_FIELD_NUMBER: _ClassVar[int]
        TURNS_FIELD_NUMBER: _ClassVar[int]
        index: int
        text: str
        cut: bool
        tokens: int
        finish: str
        logprob: float
        outcome: str
        reward: float
        detail: str
        fate: str
        agent: str
        turns: _containers.RepeatedCompositeFieldContainer[SamplesPage.Turn]
        def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., cut: bool = ..., tokens: _Optional[int] = ..., finish: _Optional[str] = ..., logprob: _Optional[float] = ..., outcome: _Optional[str] = ..., reward: _Optional[float] = ..., detail: _Optional[str] = ..., fate: _Optional[str] = ..., agent: _Optional[str] = ..., turns: _Optional[_Iterable[_Union[SamplesPage.Turn, _Mapping]]] = ...) -> None: ...
    class Turn(_message.Message):
        __slots__ = ("text", "observation")
        TEXT_FIELD_NUMBER: _ClassVar[int]
        OBSERVATION_FIELD_NUMBER: _ClassVar[int]
        text: str
        observation: str
        def __init__(self, text: _Optional[str] = ..., observation: _Optional[str] = ...) -> None: ...
    PROMPTS_IN_ALL_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    FATES_FIELD_NUMBER: _ClassVar[int]
    SUITES_FIELD_NUMBER: _ClassVar[int]
    prompts_in_all: int
    prompts: _containers.RepeatedCompositeFieldContainer[SamplesPage.Prompt]
    outcomes: _containers.ScalarMap[str, int]
    fates: _containers.ScalarMap[str, int]
    suites: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompts_in_all: _Optional[int] = ..., prompts: _Optional[_Iterable[_Union[SamplesPage.Prompt, _Mapping]]] = ..., outcomes: _Optional[_Mapping[str, int]] = ..., fates: _Optional[_Mapping[str, int]] = ..., suites: _Optional[_Iterable[str]] = ...) -> None: ...
