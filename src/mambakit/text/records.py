"""Records from JSON lines, CSV, Parquet and Arrow files: a value by field, and where each stands."""

import csv
import importlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mambakit.optional import need

FIELDS = ("messages", "prompt", "completion", "text", "tools")
"""What is read; others may be there."""


class Record(NamedTuple):
    where: str
    """The file and the line or row in it, for a person."""
    values: dict[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """Of a file whose ending is one of `READERS`. ValueError names the file and the line."""
    some = False
    for where, values in READERS[path.suffix.lower()](path):
        some = True
        if not any(name in values for name in FIELDS):
            has = ", ".join(map(str, values)) or "none"
            raise ValueError(f"{path}, {where} has the fields {has}; expected messages, prompt and completion, or text")
        yield Record(f"{path.name}, {where}", values)
    if not some:
        raise ValueError(f"{path} holds no records")


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A JSON object per line; lines without anything are passed over."""
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}") from error
        except UnicodeDecodeError as error:
            told = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
            raise ValueError(f"{path}, line {number} is not UTF-8: {told}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number} is {called(values)}, expected an object")
        yield f"line {number}", values


def read_csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first line names the fields; quoted values may go over several lines."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line} is not UTF-8: byte 0x{error.object[error.start]:02x}") from error
    limit = csv.field_size_limit(len(text) + 1)
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = next(rows, [])
        start = rows.line_num + 1
        for row in rows:
            if row and len(row) != len(names):
                raise ValueError(f"{path}, line {start} has {len(row)} values, and line 1 names {len(names)} fields")
            if row:
                yield f"line {start}", dict(zip(names, row, strict=True))
            start = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    finally:
        csv.field_size_limit(limit)


def read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    return _rows(path, lambda arrow: arrow.parquet.ParquetFile(path).iter_batches(columns=_columns(path)))


def read_arrow(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `datasets` saves them, or a file with an index (Feather)."""

    def batches(arrow: Any) -> Iterator[Any]:
        with open(path, "rb") as file:
            indexed = file.read(6) == b"ARROW1"
        with arrow.OSFile(str(path)) as file:
            if indexed:
                reader = arrow.ipc.open_file(file)
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from arrow.ipc.open_stream(file)

    return _rows(path, batches)


READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".jsonl": read_lines,
    ".ndjson": read_lines,
    ".csv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
BINARY = (".parquet", ".arrow")


def called(value: Any) -> str:
    """What JSON calls the type of a value."""
    kinds: Sequence[tuple[Any, str]] = (
        (type(None), "null"),
        (bool, "true or false"),
        (int | float, "a number"),
        (str, "a text"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def _rows(path: Path, batches: Callable[[Any], Iterator[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    arrow, number = _pyarrow(path), 0
    try:
        for batch in batches(arrow):
            batch.validate(full=True)  # arrow believes its files, and would read beyond them
            known = [name for name in batch.schema.names if name in FIELDS]
            # With names of other fields only, for the message that lists them.
            for values in batch.select(known).to_pylist() if known else [dict.fromkeys(batch.schema.names)]:
                number += 1
                yield f"row {number}", values
    except Exception as error:  # arrow's own, and Python's for texts that are none
        raise ValueError(f"{path} cannot be read: {error}") from error


def _columns(path: Path) -> list[str] | None:
    """The fields to read; None is all, where none is known."""
    names = _pyarrow(path).parquet.read_schema(path).names
    return [name for name in names if name in FIELDS] or None


def _pyarrow(path: Path) -> Any:
    arrow = need(f"reading {path}", "pyarrow")
    for name in ("pyarrow.ipc", "pyarrow.parquet"):
        importlib.import_module(name)
    return arrow
