"""Makes the tables in data/rows: small files as pyarrow and datasets write them, and their rows.

    python make_rows.py

It needs `pip install pyarrow==26.0.1 datasets==5.2.0` and writes the same bytes each time.
"""

import datetime
import decimal
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path(__file__).parent / "data/rows"


def write_types():
    """All types of columns that a file of prompts has, and some that it rarely has."""
    table = pa.table(
        {
            "prompt": pa.array(["1+1=", "ä\n\"q\"", "😀"], pa.large_string()),
            "answer": pa.array([2, None, -7], pa.int64()),
            "score": pa.array([0.5, 1.0, None], pa.float64()),
            "small": pa.array([1, 2, 3], pa.uint8()),
            "flag": pa.array([True, None, False]),
            "tests": pa.array([["a", "b"], [], None], pa.list_(pa.string())),
            "meta": pa.array([{"level": 1, "tags": ["x"]}, None, {"level": None, "tags": []}]),
            "day": pa.array([datetime.date(2026, 3, 7), None, None]),
            "price": pa.array([decimal.Decimal("1.50"), None, None], pa.decimal128(9, 2)),
            "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
            "binary": pa.array([b"text", None, None], pa.binary()),
        }
    )
    pq.write_table(table, OUT / "types.parquet", compression="zstd", row_group_size=2)


def write_conversations():
    """Conversations as ShareGPT has them, written as the hub's conversion writes them."""
    turns = lambda *texts: [
        {"from": ["human", "gpt"][number % 2], "value": text} for number, text in enumerate(texts)
    ]
    rows = [
        {"conversations": turns("2+2=", "4"), "category": "sums"},
        {"conversations": turns("Hi", "Hello!", "3+3=", "6"), "category": "sums"},
        {"conversations": turns("Bye", "Goodbye."), "category": "talk"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(OUT / "conversations.parquet")


def write_bytes_column():
    """A column of bytes that are no text."""
    table = pa.table({"prompt": ["a", "b"], "image": pa.array([None, b"\xff\xd8"], pa.binary())})
    pq.write_table(table, OUT / "image.parquet")


def write_pages():
    """Second versions of pages, and the encoding in which values share their beginnings."""
    table = pa.table({"prompt": [f"number {n}" for n in range(100)]})
    pq.write_table(table, OUT / "pages-v2.parquet", data_page_version="2.0", data_page_size=200)
    pq.write_table(
        table,
        OUT / "delta.parquet",
        use_dictionary=False,
        column_encoding={"prompt": "DELTA_BYTE_ARRAY"},
    )
    pq.write_table(table, OUT / "gzip.parquet", compression="gzip")


def as_text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    write_types()
    write_conversations()
    write_bytes_column()
    write_pages()
    rows = pq.read_table(OUT / "types.parquet").to_pylist()
    (OUT / "types.json").write_text(json.dumps(rows, default=as_text, indent=1) + "\n")


main()
