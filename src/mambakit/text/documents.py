"""Documents from files and folders, and which of them are held out."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

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


def read_documents(paths: Sequence[str | Path], *, binary: bool = False) -> Found:
    """Every file that is named or lies in a folder that is named, in the order of their names.

    A file named that cannot be used raises: OSError if it cannot be read, ValueError if it is empty or, without
    `binary`, holds zero bytes. One inside a folder is left out with a note. Hidden files are not looked at.
    """
    documents: list[Document] = []
    left_out: dict[str, list[str]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        if path.is_dir():
            inside = _read_folder(path, binary, left_out)
            if not inside:
                raise ValueError(f"the folder {path} holds no text{_reasons(left_out)}")
            documents += inside
            continue
        content = path.read_bytes()
        problem = _problem(content, binary)
        if problem:
            hint = "; --binary trains on its bytes as they are" if problem == "binary" else ""
            raise ValueError(f"{path} is {problem}{hint}")
        documents.append(Document(path.name, content))
    return Found(documents, [_note(reason, names) for reason, names in left_out.items()])


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

    Whole documents are held out, chosen by their names; of only a few documents the end of each.
    """
    if not 0 < share < 1:
        raise ValueError(f"held-out share = {share} has to be between 0 and 1")
    if len(documents) < FEW:
        cuts = [int(len(content) * (1 - share)) for _, content in documents]
        pairs = list(zip(documents, cuts, strict=True))
        train = [Document(name, content[:cut]) for (name, content), cut in pairs if cut]
        return train, [Document(f"{name} (end)", content[cut:]) for (name, content), cut in pairs]
    wanted = share * sum(len(content) for _, content in documents)
    train, held, size = [], [], 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        # One very long document would be most of what is held out.
        if size < wanted and len(document.content) < max(wanted, 1):
            held.append(document)
            size += len(document.content)
        else:
            train.append(document)
    return sorted(train), sorted(held)


def _read_folder(folder: Path, binary: bool, left_out: dict[str, list[str]]) -> list[Document]:
    documents = []
    for path in _files_in(folder):
        name = path.relative_to(folder.parent).as_posix()
        try:
            content = path.read_bytes()
        except OSError as error:
            left_out.setdefault(f"not readable ({error.strerror})", []).append(name)
            continue
        problem = _problem(content, binary)
        if problem:
            left_out.setdefault(problem, []).append(name)
        else:
            documents.append(Document(name, content))
    return documents


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
