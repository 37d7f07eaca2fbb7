import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FleetConfig(_message.Message):
    __slots__ = ("store", "gateway", "lease_s")
    STORE_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    store: str
    gateway: str
    lease_s: float
    def __init__(self, store: _Optional[str] = ..., gateway: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class AgentStatus(_message.Message):
    __slots__ = ("agent", "host", "version", "roles", "pool", "state", "started_at", "seen_at", "cpus", "memory_bytes", "rss_bytes", "jobs", "tokens_per_s", "jobs_done", "trouble", "profile", "engines", "telemetry", "withheld", "training_bytes", "abilities", "sample_s", "exchange", "served", "stack", "training_speed")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[AgentStatus.State]
        READY: _ClassVar[AgentStatus.State]
        DRAINING: _ClassVar[AgentStatus.State]
        STOPPED: _ClassVar[AgentStatus.State]
        QUARANTINED: _ClassVar[AgentStatus.State]
    STATE_UNSPECIFIED: AgentStatus.State
    READY: AgentStatus.State
    DRAINING: AgentStatus.State
    STOPPED: AgentStatus.State
    QUARANTINED: AgentStatus.State
    class TrainingSpeed(_message.Message):
        __slots__ = ("base", "tokens_per_s")
        BASE_FIELD_NUMBER: _ClassVar[int]
        TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
        base: str
        tokens_per_s: float
        def __init__(self, base: _Optional[str] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...
    AGENT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    SEEN_AT_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    JOBS_DONE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    TRAINING_BYTES_FIELD_NUMBER: _ClassVar[int]
    ABILITIES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SPEED_FIELD_NUMBER: _ClassVar[int]
    agent: str
    host: str
    version: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    state: AgentStatus.State
    started_at: _timestamp_pb2.Timestamp
    seen_at: _timestamp_pb2.Timestamp
    cpus: int
    memory_bytes: int
    rss_bytes: int
    jobs: _containers.RepeatedCompositeFieldContainer[ActiveJob]
    tokens_per_s: float
    jobs_done: int
    trouble: str
    profile: str
    engines: _containers.RepeatedScalarFieldContainer[str]
    telemetry: Telemetry
    withheld: _containers.RepeatedCompositeFieldContainer[Withheld]
    training_bytes: int
    abilities: _containers.RepeatedScalarFieldContainer[str]
    sample_s: float
    exchange: Exchange
    served: _containers.RepeatedCompositeFieldContainer[ServedChannel]
    stack: Stack
    training_speed: AgentStatus.TrainingSpeed
    def __init__(self, agent: _Optional[str] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ..., state: _Optional[_Union[AgentStatus.State, str]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., seen_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cpus: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., jobs: _Optional[_Iterable[_Union[ActiveJob, _Mapping]]] = ..., tokens_per_s: _Optional[float] = ..., jobs_done: _Optional[int] = ..., trouble: _Optional[str] = ..., profile: _Optional[str] = ..., engines: _Optional[_Iterable[str]] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., withheld: _Optional[_Iterable[_Union[Withheld, _Mapping]]] = ..., training_bytes: _Optional[int] = ..., abilities: _Optional[_Iterable[str]] = ..., sample_s: _Optional[float] = ..., exchange: _Optional[_Union[Exchange, _Mapping]] = ..., served: _Optional[_Iterable[_Union[ServedChannel, _Mapping]]] = ..., stack: _Optional[_Union[Stack, _Mapping]] = ..., training_speed: _Optional[_Union[AgentStatus.TrainingSpeed, _Mapping]] = ...) -> None: ...

class Stack(_message.Message):
    __slots__ = ("name", "kernel", "rocm", "torch", "llama_cpp", "differences")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    ROCM_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    LLAMA_CPP_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kernel: str
    rocm: str
    torch: str
    llama_cpp: str
    differences: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., kernel: _Optional[str] = ..., rocm: _Optional[str] = ..., torch: _Optional[str] = ..., llama_cpp: _Optional[str] = ..., differences: _Optional[_Iterable[str]] = ...) -> None: ...

class ServedChannel(_message.Message):
    __slots__ = ("channel", "number", "slots", "active", "error")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    channel: str
    number: int
    slots: int
    active: int
    error: str
    def __init__(self, channel: _Optional[str] = ..., number: _Optional[int] = ..., slots: _Optional[int] = ..., active: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Exchange(_message.Message):
    __slots__ = ("key", "addresses", "bytes_from_store", "bytes_from_peers", "bytes_to_peers")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FROM_PEERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_TO_PEERS_FIELD_NUMBER: _ClassVar[int]
    key: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    bytes_from_store: int
    bytes_from_peers: int
    bytes_to_peers: int
    def __init__(self, key: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., bytes_from_store: _Optional[int] = ..., bytes_from_peers: _Optional[int] = ..., bytes_to_peers: _Optional[int] = ...) -> None: ...

class Withheld(_message.Message):
    __slots__ = ("role", "finding", "seen", "remedy")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    role: str
    finding: str
    seen: str
    remedy: str
    def __init__(self, role: _Optional[str] = ..., finding: _Optional[str] = ..., seen: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("at", "gpus", "cpu_busy", "cpu_system", "memory_total", "memory_available", "swap_total", "swap_free", "cpu_pressure", "io_pressure", "memory_pressure", "tlb_shootdowns", "tlb_shootdowns_per_s", "allocation_stalls_per_s", "direct_scans_per_s", "swapped_in_per_s", "swapped_out_per_s", "watts", "joules", "storm", "warnings", "resting")
    class Gpu(_message.Message):
        __slots__ = ("ordinal", "gfx", "card", "pci", "integrated", "asleep", "busy_percent", "vram_total", "vram_used", "gtt_total", "gtt_used", "watts", "temperatures", "clocks")
        ORDINAL_FIELD_NUMBER: _ClassVar[int]
        GFX_FIELD_NUMBER: _ClassVar[int]
        CARD_FIELD_NUMBER: _ClassVar[int]
        PCI_FIELD_NUMBER: _ClassVar[int]
        INTEGRATED_FIELD_NUMBER: _ClassVar[int]
        ASLEEP_FIELD_NUMBER: _ClassVar[int]
        BUSY_PERCENT_FIELD_NUMBER: _ClassVar[int]
        VRAM_TOTAL_FIELD_NUMBER: _ClassVar[int]
        VRAM_USED_FIELD_NUMBER: _ClassVar[int]
        GTT_TOTAL_FIELD_NUMBER: _ClassVar[int]
        GTT_USED_FIELD_NUMBER: _ClassVar[int]
        WATTS_FIELD_NUMBER: _ClassVar[int]
        TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
        CLOCKS_FIELD_NUMBER: _ClassVar[int]
        ordinal: int
        gfx: str
        card: str
        pci: str
        integrated: bool
        asleep: bool
        busy_percent: float
        vram_total: int
        vram_used: int
        gtt_total: int
        gtt_used: int
        watts: float
        temperatures: _containers.RepeatedCompositeFieldContainer[Telemetry.Temperature]
        clocks: _containers.RepeatedCompositeFieldContainer[Telemetry.Clock]
        def __init__(self, ordinal: _Optional[int] = ..., gfx: _Optional[str] = ..., card: _Optional[str] = ..., pci: _Optional[str] = ..., integrated: bool = ..., asleep: bool = ..., busy_percent: _Optional[float] = ..., vram_total: _Optional[int] = ..., vram_used: _Optional[int] = ..., gtt_total: _Optional[int] = ..., gtt_used: _Optional[int] = ..., watts: _Optional[float] = ..., temperatures: _Optional[_Iterable[_Union[Telemetry.Temperature, _Mapping]]] = ..., clocks: _Optional[_Iterable[_Union[Telemetry.Clock, _Mapping]]] = ...) -> None: ...
    class Temperature(_message.Message):
        __slots__ = ("sensor", "celsius", "critical")
        SENSOR_FIELD_NUMBER: _ClassVar[int]
        CELSIUS_FIELD_NUMBER: _ClassVar[int]
        CRITICAL_FIELD_NUMBER: _ClassVar[int]
        sensor: str
        celsius: float
        critical: float
        def __init__(self, sensor: _Optional[str] = ..., celsius: _Optional[float] = ..., critical: _Optional[float] = ...) -> None: ...
    class Clock(_message.Message):
        __slots__ = ("sensor", "hertz")
        SENSOR_FIELD_NUMBER: _ClassVar[int]
        HERTZ_FIELD_NUMBER: _ClassVar[int]
        sensor: str
        hertz: int
        def __init__(self, sensor: _Optional[str] = ..., hertz: _Optional[int] = ...) -> None: ...
    class Pressure(_message.Message):
        __slots__ = ("some_avg10", "some_us", "full_us")
        SOME_AVG10_FIELD_NUMBER: _ClassVar[int]
        SOME_US_FIELD_NUMBER: _ClassVar[int]
        FULL_US_FIELD_NUMBER: _ClassVar[int]
        some_avg10: float
        some_us: int
        full_us: int
        def __init__(self, some_avg10: _Optional[float] = ..., some_us: _Optional[int] = ..., full_us: _Optional[int] = ...) -> None: ...
    class Storm(_message.Message):
        __slots__ = ("level", "cause", "reaction", "storms")
        class Level(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            LEVEL_UNSPECIFIED: _ClassVar[Telemetry.Storm.Level]
            CALM: _ClassVar[Telemetry.Storm.Level]
            WARN: _ClassVar[Telemetry.Storm.Level]
            STORM: _ClassVar[Telemetry.Storm.Level]
        LEVEL_UNSPECIFIED: Telemetry.Storm.Level
        CALM: Telemetry.Storm.Level
        WARN: Telemetry.Storm.Level
        STORM: Telemetry.Storm.Level
        LEVEL_FIELD_NUMBER: _ClassVar[int]
        CAUSE_FIELD_NUMBER: _ClassVar[int]
        REACTION_FIELD_NUMBER: _ClassVar[int]
        STORMS_FIELD_NUMBER: _ClassVar[int]
        level: Telemetry.Storm.Level
        cause: str
        reaction: str
        storms: int
        def __init__(self, level: _Optional[_Union[Telemetry.Storm.Level, str]] = ..., cause: _Optional[str] = ..., reaction: _Optional[str] = ..., storms: _Optional[int] = ...) -> None: ...
    AT_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    CPU_BUSY_FIELD_NUMBER: _ClassVar[int]
    CPU_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SWAP_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SWAP_FREE_FIELD_NUMBER: _ClassVar[int]
    CPU_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    IO_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TLB_SHOOTDOWNS_FIELD_NUMBER: _ClassVar[int]
    TLB_SHOOTDOWNS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_STALLS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DIRECT_SCANS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_PER_S_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    STORM_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    at: _timestamp_pb2.Timestamp
    gpus: _containers.RepeatedCompositeFieldContainer[Telemetry.Gpu]
    cpu_busy: float
    cpu_system: float
    memory_total: int
    memory_available: int
    swap_total: int
    swap_free: int
    cpu_pressure: Telemetry.Pressure
    io_pressure: Telemetry.Pressure
    memory_pressure: Telemetry.Pressure
    tlb_shootdowns: int
    tlb_shootdowns_per_s: float
    allocation_stalls_per_s: float
    direct_scans_per_s: float
    swapped_in_per_s: float
    swapped_out_per_s: float
    watts: float
    joules: float
    storm: Telemetry.Storm
    warnings: _containers.RepeatedScalarFieldContainer[str]
    resting: str
    def __init__(self, at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., gpus: _Optional[_Iterable[_Union[Telemetry.Gpu, _Mapping]]] = ..., cpu_busy: _Optional[float] = ..., cpu_system: _Optional[float] = ..., memory_total: _Optional[int] = ..., memory_available: _Optional[int] = ..., swap_total: _Optional[int] = ..., swap_free: _Optional[int] = ..., cpu_pressure: _Optional[_Union[Telemetry.Pressure, _Mapping]] = ..., io_pressure: _Optional[_Union[Telemetry.Pressure, _Mapping]] = ..., memory_pressure: _Optional[_Union[Telemetry.Pressure, _Mapping]] = ..., tlb_shootdowns: _Optional[int] = ..., tlb_shootdowns_per_s: _Optional[float] = ..., allocation_stalls_per_s: _Optional[float] = ..., direct_scans_per_s: _Optional[float] = ..., swapped_in_per_s: _Optional[float] = ..., swapped_out_per_s: _Optional[float] = ..., watts: _Optional[float] = ..., joules: _Optional[float] = ..., storm: _Optional[_Union[Telemetry.Storm, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., resting: _Optional[str] = ...) -> None: ...

class ActiveJob(_message.Message):
    __slots__ = ("role", "run", "cycle", "job", "done", "total", "note", "waits")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    role: str
    run: str
    cycle: int
    job: str
    done: int
    total: int
    note: str
    waits: bool
    def __init__(self, role: _Optional[str] = ..., run: _Optional[str] = ..., cycle: _Optional[int] = ..., job: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., note: _Optional[str] = ..., waits: bool = ...) -> None: ...

class AgentCommand(_message.Message):
    __slots__ = ("action",)
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[AgentCommand.Action]
        DRAIN: _ClassVar[AgentCommand.Action]
    ACTION_UNSPECIFIED: AgentCommand.Action
    DRAIN: AgentCommand.Action
    ACTION_FIELD_NUMBER: _ClassVar[int]
    action: AgentCommand.Action
    def __init__(self, action: _Optional[_Union[AgentCommand.Action, str]] = ...) -> None: ...
