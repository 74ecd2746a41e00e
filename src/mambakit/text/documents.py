"""Documents and conversations from files and folders, and which of them are held out."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from mambakit.text.conversations import Conversation, conversation, text_of
from mambakit.text.records import BINARY, READERS, read_records

SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
FEW = 20
"""With fewer documents than this, the end of each is held out instead of whole ones."""


class Document(NamedTuple):
    name: str
    content: bytes


class Found(NamedTuple):
    documents: list[Document]
    notes: list[str]
    """What was left out and why, a line each."""
    conversations: Sequence[Conversation] = ()


Named = TypeVar("Named", Document, Conversation)
OTHER_SPLITS = re.compile(r"(test|validation|valid|val|dev|eval)([^a-z].*)?")
TRAINED = re.compile(r"train([^a-z].*)?")


def read_documents(paths: Sequence[str | Path], *, binary: bool = False, records: bool = True) -> Found:
    """Every file that is named or lies in a folder that is named, in the order of their names.

    A file named that cannot be used raises: OSError if it cannot be read, ValueError if it is empty or, without
    `binary`, holds zero bytes. One inside a folder is left out with a note. Hidden files are not looked at.

    With `records`, files that end as `READERS` do hold texts and conversations; what is wrong in one raises ValueError
    with its line. Of a folder with Parquet or Arrow files, a dataset, these are all that is read, and where files or
    folders are called train and test, only the former.
    """
    found = _Found([], [], {})
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        if path.is_dir():
            before = len(found.documents) + len(found.conversations)
            _read_folder(path, binary, records, found)
            if before == len(found.documents) + len(found.conversations):
                raise ValueError(f"the folder {path} holds no text{_reasons(found.left_out)}")
            continue
        if records and path.suffix.lower() in READERS:
            _read_records(path, path.name, found)
            continue
        content = path.read_bytes()
        problem = _problem(content, binary)
        if problem:
            hint = "; --binary trains on its bytes as they are" if problem == "binary" else ""
            raise ValueError(f"{path} is {problem}{hint}")
        found.documents.append(Document(path.name, content))
    return Found(found.documents, [_note(*left) for left in found.left_out.items()], found.conversations)


def standard_library() -> list[Document]:
    """The sources of this Python's standard library: real text on every machine.

    Without tests, which not every installation has, and without `encodings` and `pydoc_data`, which are tables and
    text that programs wrote.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    not_written = {"test", "tests", "idle_test", "encodings", "pydoc_data"}
    sources = (path for path in _files_in(root) if path.suffix == ".py")
    sources = [path for path in sources if not not_written & set(path.relative_to(root).parts)]
    documents = [Document(path.relative_to(root).as_posix(), path.read_bytes()) for path in sources]
    documents = [document for document in documents if _problem(document.content, binary=False) is None]
    if not documents:
        raise ValueError("this Python comes without the sources of its standard library; name files to train on")
    return documents


def hold_out(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Documents to train on and about `share` of the bytes to evaluate on, the same at every call.

    Whole documents are held out, chosen by their names; of only a few documents, or long ones only, the end of each.
    """
    if not 0 < share < 1:
        raise ValueError(f"held-out share = {share} has to be between 0 and 1")
    if len(documents) < FEW:
        return _hold_out_ends(documents, share)
    wanted = share * sum(len(content) for _, content in documents)
    train, held, size = [], [], 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        # One very long document would be most of what is held out.
        if size < wanted and len(document.content) < max(wanted, 1):
            held.append(document)
            size += len(document.content)
        else:
            train.append(document)
    return (sorted(train), sorted(held)) if size else _hold_out_ends(documents, share)


def _hold_out_ends(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    cuts = [int(len(content) * (1 - share)) for _, content in documents]
    pairs = list(zip(documents, cuts, strict=True))
    train = [Document(name, content[:cut]) for (name, content), cut in pairs if cut]
    return train, [Document(f"{name} (end)", content[cut:]) for (name, content), cut in pairs]


def hold_out_whole(items: Sequence[Named], share: float) -> tuple[list[Named], list[Named]]:
    """Of conversations about `share`, at least one, chosen by their names, the same at every call."""
    if not 0 < share < 1:
        raise ValueError(f"held-out share = {share} has to be between 0 and 1")
    if len(items) < 2:
        raise ValueError("there is one conversation; with two, one can be held out and the other trained on")
    drawn = sorted(range(len(items)), key=lambda i: hashlib.sha256(items[i].name.encode()).digest())
    held = set(drawn[: min(max(1, round(share * len(items))), len(items) - 1)])
    return [one for i, one in enumerate(items) if i not in held], [items[i] for i in sorted(held)]


class _Found(NamedTuple):
    """What has been read so far."""

    documents: list[Document]
    conversations: list[Conversation]
    left_out: dict[str, list[str]]

    def leave_out(self, reason: str, name: str) -> None:
        self.left_out.setdefault(reason, []).append(name)


def _read_folder(folder: Path, binary: bool, records: bool, found: _Found) -> None:
    files = _files_in(folder)
    of_records = [path for path in files if records and path.suffix.lower() in READERS]
    is_dataset = any(path.suffix.lower() in BINARY for path in of_records)
    splits = {path: _split(path.relative_to(folder)) for path in of_records}
    for path in files:
        name = path.relative_to(folder.parent).as_posix()
        if is_dataset and path not in splits:
            found.leave_out("beside a dataset", name)
        elif splits.get(path) == "other" and "train" in splits.values():
            found.leave_out("of other splits", name)
        elif path in splits:
            _read_records(path, name, found)
        else:
            _read_text(path, name, binary, found)


def _split(path: Path) -> str | None:
    """Which part of a dataset a file is, as its name or that of a folder tells."""
    for part in path.parts:
        if TRAINED.fullmatch(part.lower()):
            return "train"
        if OTHER_SPLITS.fullmatch(part.lower()):
            return "other"
    return None


def _read_records(path: Path, name: str, found: _Found) -> None:
    for record in read_records(path):
        said = conversation(record)
        if said is not None:
            found.conversations.append(said)
        elif text := text_of(record):
            found.documents.append(Document(f"{name}, {record.where.rpartition(', ')[2]}", text.encode()))
        else:
            found.leave_out("empty", record.where)


def _read_text(path: Path, name: str, binary: bool, found: _Found) -> None:
    try:
        content = path.read_bytes()
    except OSError as error:
        found.leave_out(f"not readable ({error.strerror})", name)
        return
    problem = _problem(content, binary)
    if problem:
        found.leave_out(problem, name)
    else:
        found.documents.append(Document(name, content))


def _files_in(folder: Path) -> list[Path]:
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        found += [Path(where, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _problem(content: bytes, binary: bool) -> str | None:
    if not content:
        return "empty"
    # Text of any usual encoding has none; UTF-16 does, and its bytes are no text to a byte-level model either.
    if not binary and b"\0" in content:
        return "binary"
    return None


def _note(reason: str, names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"left out {len(names)} {reason}: {shown}"


def _reasons(left_out: dict[str, list[str]]) -> str:
    return "".join(f"; {_note(reason, names)}" for reason, names in left_out.items())
