"""One run per folder."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mambakit.training.processes import Ranks

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"
CANNOT_LOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""What file systems say that know no locks. A run there has to go without."""


@contextmanager
def alone_in(folder: Path, ranks: Ranks) -> Iterator[None]:
    """The folder, made if need be, belongs to this run; ValueError on every rank if it is that of another.

    The system lets go of it when the process ends, however it ends. A folder that was made and stays empty is removed.
    """
    claim = problem = None
    if ranks.is_first:
        try:
            claim = _Claim(folder)
        except (OSError, ValueError) as error:
            problem = error
    problem = ranks.share(problem)
    if problem is not None:
        raise problem
    try:
        yield
    finally:
        if claim is not None:
            claim.release()


class _Claim:
    def __init__(self, folder: Path):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; choose another --out")
        self._folder, self._made = folder, not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._file = self._take()
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def _take(self) -> int:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(file)
                # Who had it may have removed the file after it was opened here.
                if self._path.exists() and os.path.samestat(os.fstat(file), os.stat(self._path)):
                    return file
            except BlockingIOError as error:
                owner = os.read(file, 20).decode("ascii", "replace").strip() or "unknown"
                os.close(file)
                told = f"{self._folder} is in use by another run (process {owner})"
                raise ValueError(f"{told}; wait until it ends, or choose another --out") from error
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)
        if self._made:
            with contextlib.suppress(OSError):  # not empty
                self._folder.rmdir()


def _lock(file: int) -> None:
    """BlockingIOError if somebody else has it."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EACCES:
            raise BlockingIOError(*error.args) from error
        if error.errno not in CANNOT_LOCK:
            raise
