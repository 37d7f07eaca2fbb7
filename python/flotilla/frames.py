"""Tables of results, with pandas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from flotilla.errors import MissingPackageError
from flotilla.records import EvalResult

if TYPE_CHECKING:
    import pandas


def to_dataframe(records: Iterable[Any]) -> pandas.DataFrame:
    """Returns a table with a row for each record: samples, evals, runs, or messages of the API.

    The pass rates of an eval have a row for each suite. Nested fields of messages have names with
    dots.

    Raises MissingPackageError without pandas.
    """
    try:
        import pandas
    except ImportError:
        raise MissingPackageError(
            "make a table: pandas is not installed",
            remedy="Install it: pip install 'flotilla[pandas]'",
        ) from None
    rows = [row for record in records for row in _to_rows(record)]
    return pandas.json_normalize(rows)


def _to_rows(record: Any) -> list[dict[str, Any]]:
    if isinstance(record, EvalResult):
        return _to_eval_rows(record)
    if isinstance(record, Message):
        return [MessageToDict(record, preserving_proto_field_name=True)]
    fields = dataclasses.fields(record)
    return [{it.name: getattr(record, it.name) for it in fields if it.name != "message"}]


def _to_eval_rows(result: EvalResult) -> list[dict[str, Any]]:
    names = ("cursor", "at", "run", "cycle", "step", "suite", "perplexity", "stderr")
    row = {name: getattr(result, name) for name in names} | {"pass_rate": None}
    if result.perplexity is not None:
        return [row]
    return [
        row | {"suite": suite, "pass_rate": rate.mean, "stderr": rate.stderr}
        for suite, rate in result.pass_rates.items()
    ]
