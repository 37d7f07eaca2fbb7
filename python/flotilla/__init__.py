"""A client of Flotilla, which fine-tunes language models over a fleet of machines.

    import flotilla

    with flotilla.connect() as fleet:    # the fleet of FLOTILLA_DIR
        run = fleet.submit("sft.yaml")
        run.wait(show=True)
        print(*run.list_evals(), sep="\\n")

`flotilla.aio` has the same for asyncio. Failures are FlotillaErrors with `code`, `message` and
`remedy`. Messages of the API are in `flotilla.v1`.
"""

from flotilla import aio
from flotilla._sync.fleet import Fleet, connect
from flotilla._sync.run import Run
from flotilla.endpoint import Endpoint
from flotilla.errors import (
    CredentialsError,
    DeadlineError,
    FlotillaError,
    InvalidRequestError,
    LimitError,
    MissingPackageError,
    NotFoundError,
    PermissionDeniedError,
    RpcError,
    RunFailedError,
    SpecFileError,
    StateError,
    UnauthenticatedError,
    UnavailableError,
)
from flotilla.frames import to_dataframe
from flotilla.progress import Progress, ProgressDisplay
from flotilla.records import HELDOUT, EvalResult, PassRate, RunInfo, Sample

# As in Cargo.toml.
__version__ = "0.2.0"

__all__ = [
    "HELDOUT",
    "CredentialsError",
    "DeadlineError",
    "Endpoint",
    "EvalResult",
    "Fleet",
    "FlotillaError",
    "InvalidRequestError",
    "LimitError",
    "MissingPackageError",
    "NotFoundError",
    "PassRate",
    "PermissionDeniedError",
    "Progress",
    "ProgressDisplay",
    "RpcError",
    "Run",
    "RunFailedError",
    "RunInfo",
    "Sample",
    "SpecFileError",
    "StateError",
    "UnauthenticatedError",
    "UnavailableError",
    "aio",
    "connect",
    "to_dataframe",
]
