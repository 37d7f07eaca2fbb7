import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateTokenRequest(_message.Message):
    __slots__ = ("roles", "pool", "uses", "expires_in_s", "gateways")
    ROLES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    uses: int
    expires_in_s: float
    gateways: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, roles: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ..., uses: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., gateways: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateTokenResponse(_message.Message):
    __slots__ = ("line", "token")
    LINE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    line: str
    token: JoinTokenInfo
    def __init__(self, line: _Optional[str] = ..., token: _Optional[_Union[JoinTokenInfo, _Mapping]] = ...) -> None: ...

class JoinTokenInfo(_message.Message):
    __slots__ = ("id", "roles", "pool", "uses", "uses_left", "created_at", "created_by", "expires_at", "revoked_at", "used_by")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    USES_LEFT_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_AT_FIELD_NUMBER: _ClassVar[int]
    USED_BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    uses: int
    uses_left: int
    created_at: _timestamp_pb2.Timestamp
    created_by: str
    expires_at: _timestamp_pb2.Timestamp
    revoked_at: _timestamp_pb2.Timestamp
    used_by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ..., uses: _Optional[int] = ..., uses_left: _Optional[int] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., created_by: _Optional[str] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoked_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., used_by: _Optional[_Iterable[str]] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTokensResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[JoinTokenInfo]
    def __init__(self, tokens: _Optional[_Iterable[_Union[JoinTokenInfo, _Mapping]]] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RevokeTokenResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("id", "secret", "name", "public_key", "roles", "host", "version", "proof")
    ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    id: str
    secret: str
    name: str
    public_key: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    host: str
    version: str
    proof: KeyProof
    def __init__(self, id: _Optional[str] = ..., secret: _Optional[str] = ..., name: _Optional[str] = ..., public_key: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., proof: _Optional[_Union[KeyProof, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("name", "proof")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    name: str
    proof: KeyProof
    def __init__(self, name: _Optional[str] = ..., proof: _Optional[_Union[KeyProof, _Mapping]] = ...) -> None: ...

class KeyProof(_message.Message):
    __slots__ = ("at_ms", "signature")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    signature: str
    def __init__(self, at_ms: _Optional[int] = ..., signature: _Optional[str] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("name", "user_jwt", "bearer", "expires_at", "valid_s", "nats", "gateways", "store", "ca_pem", "roles", "pool", "scope")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USER_JWT_FIELD_NUMBER: _ClassVar[int]
    BEARER_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    VALID_S_FIELD_NUMBER: _ClassVar[int]
    NATS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    CA_PEM_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    user_jwt: str
    bearer: str
    expires_at: _timestamp_pb2.Timestamp
    valid_s: float
    nats: _containers.RepeatedScalarFieldContainer[str]
    gateways: _containers.RepeatedScalarFieldContainer[str]
    store: str
    ca_pem: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    scope: str
    def __init__(self, name: _Optional[str] = ..., user_jwt: _Optional[str] = ..., bearer: _Optional[str] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., valid_s: _Optional[float] = ..., nats: _Optional[_Iterable[str]] = ..., gateways: _Optional[_Iterable[str]] = ..., store: _Optional[str] = ..., ca_pem: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ..., scope: _Optional[str] = ...) -> None: ...

class CreateUserRequest(_message.Message):
    __slots__ = ("name", "public_key", "scope", "expires_in_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    public_key: str
    scope: str
    expires_in_s: float
    def __init__(self, name: _Optional[str] = ..., public_key: _Optional[str] = ..., scope: _Optional[str] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class CreateLoginCodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoginCode(_message.Message):
    __slots__ = ("code", "expires_at")
    CODE_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    code: str
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, code: _Optional[str] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ExchangeLoginCodeRequest(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: str
    def __init__(self, code: _Optional[str] = ...) -> None: ...

class LoginSession(_message.Message):
    __slots__ = ("bearer",)
    BEARER_FIELD_NUMBER: _ClassVar[int]
    bearer: str
    def __init__(self, bearer: _Optional[str] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RevokeResponse(_message.Message):
    __slots__ = ("revoked_at",)
    REVOKED_AT_FIELD_NUMBER: _ClassVar[int]
    revoked_at: _timestamp_pb2.Timestamp
    def __init__(self, revoked_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberInfo]
    def __init__(self, members: _Optional[_Iterable[_Union[MemberInfo, _Mapping]]] = ...) -> None: ...

class MemberInfo(_message.Message):
    __slots__ = ("name", "public_key", "roles", "pool", "scope", "joined_at", "renewed_at", "expires_at", "revoked_at", "token", "host", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    JOINED_AT_FIELD_NUMBER: _ClassVar[int]
    RENEWED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_AT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    public_key: str
    roles: _containers.RepeatedScalarFieldContainer[str]
    pool: str
    scope: str
    joined_at: _timestamp_pb2.Timestamp
    renewed_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    revoked_at: _timestamp_pb2.Timestamp
    token: str
    host: str
    version: str
    def __init__(self, name: _Optional[str] = ..., public_key: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ..., pool: _Optional[str] = ..., scope: _Optional[str] = ..., joined_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., renewed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoked_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., token: _Optional[str] = ..., host: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...
