"""The compiled kernels: where they are, which instruction set they use, and why they are missing if they are.

A plain C library called through ctypes, which lets go of the GIL; the torch operators around it are in the modules
beside this one. See docs/decisions/0007-kernels-as-a-c-library.md.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mambakit.kernels.cpu.structs import Struct, difference

# In order of preference.
INSTRUCTION_SETS = ("avx512", "avx2", "neon", "plain")
# What a processor may have beyond them, each including those before it: `mk_extension` of csrc/extension.h.
EXTENSIONS = ("none", "vnni", "bf16", "i8mm")
# For prompts, beside the best of those with avx512: `mk_tiles` there. What is emulated is for tests and never chosen.
TILES = ("none", "amx-emulated", "amx")
# What a kernel returns if it could not do its work: `mk_status` of csrc/threads.h.
STATUS = {
    1: (MemoryError, "found no memory for its work"),
    2: (RuntimeError, "was refused by torch's thread pool; torch.set_num_threads(1) does without it"),
}


class KernelsMissingError(ImportError):
    """The compiled kernels are not there or cannot be used; the message says why."""


class Library:
    """The loaded library, bound to one instruction set.

    `MAMBAKIT_KERNELS` names another file to load (`none`: none at all), `MAMBAKIT_ISA` another instruction set than the
    best one, `MAMBAKIT_EXTENSION` another of its extensions or tiles (`none`: neither). They are read once, at the
    first use of a kernel.
    """

    def __init__(self) -> None:
        self.path = _find()
        try:
            self.native = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise KernelsMissingError(f"{self.path.name} does not load: {error}") from error
        self.usable = [name for name in INSTRUCTION_SETS if self._ask("can_run", name)]
        self.instruction_set = os.environ.get("MAMBAKIT_ISA") or next(iter(self.usable), "plain")
        if self.usable and self.instruction_set not in self.usable:
            raise KernelsMissingError(
                f"MAMBAKIT_ISA is {self.instruction_set!r}, but this machine can run {', '.join(self.usable)}"
            )
        differs = difference(self._layouts()) or self._lacks()
        if differs is not None:
            raise KernelsMissingError(
                f"{self.path.name} was built from other sources than this version of mambakit: {differs}; "
                "rebuild it (`make kernels`) or reinstall mambakit"
            )
        self.has_torch_threads = self._hand_in_threads()
        extensions = self.extensions_of(self.instruction_set)
        self.extension = os.environ.get("MAMBAKIT_EXTENSION") or extensions[-1]
        if self.extension not in extensions:
            why = f" (AMX: {self.why_no_amx(self.instruction_set)})" if self.extension == "amx" else ""
            raise KernelsMissingError(
                f"MAMBAKIT_EXTENSION is {self.extension!r}, but this machine has {', '.join(extensions)} "
                f"beside {self.instruction_set}{why}"
            )
        self.use(self.extension)

    def extensions_of(self, instruction_set: str) -> tuple[str, ...]:
        """What may be used beside an instruction set, the best one last."""
        vectors = EXTENSIONS[: 1 + (self._ask("extension_of", instruction_set) or 0)]
        if not hasattr(self.native, f"mk_amx_refused_{instruction_set}"):
            return vectors
        return ("amx-emulated", *vectors, *(() if self.why_no_amx(instruction_set) else ("amx",)))

    def why_no_amx(self, instruction_set: str) -> str | None:
        """None where AMX can be used and, tried, gives the right products; otherwise the reason."""
        asked = os.environ.get("MAMBAKIT_EXTENSION")
        if asked not in (None, "", "amx"):
            return f"MAMBAKIT_EXTENSION is {asked!r}"
        for question in ("amx_refused", "amx_differs"):
            answer = self._ask(question, instruction_set, answer=ctypes.c_char_p)
            if answer is None:
                return f"it is used with avx512, not with {instruction_set}"
            if answer:
                return answer.decode()
        return None

    def use(self, extension: str) -> None:
        """From here on this one of those that the instruction set has."""
        best = self._ask("extension_of", self.instruction_set) or 0
        vectors = EXTENSIONS.index(extension) if extension in EXTENSIONS else best
        self.native.mk_set_extension(ctypes.c_int64(vectors))
        self.native.mk_set_tiles(ctypes.c_int64(TILES.index(extension) if extension in TILES else 0))

    def function(self, struct: type[Struct]) -> Callable[[Struct], int]:
        """The kernel that takes `struct` and returns a status."""
        kernel = getattr(self.native, f"mk_{struct.kernel}_{self.instruction_set}")
        kernel.argtypes = [ctypes.POINTER(struct)]
        return kernel

    def _ask(self, question: str, instruction_set: str, *arguments: int, answer: Any = ctypes.c_int32) -> Any:
        """What the library answers, None where it has never heard of the question."""
        function = getattr(self.native, f"mk_{question}_{instruction_set}", None)
        if function is None:
            return None
        function.restype, function.argtypes = answer, [ctypes.c_int64] * len(arguments)
        return function(*arguments)

    def _layouts(self) -> Iterator[str]:
        """How the library declares its kernels and structs."""
        for n in count():
            layout = self._ask("layout", self.instruction_set, n, answer=ctypes.c_char_p)
            if layout is None:
                return
            yield layout.decode()

    def _lacks(self) -> str | None:
        """The first function, beside kernels, that is expected and not there."""
        names = ("mk_set_threads", "mk_set_extension", "mk_set_tiles")
        missing = [name for name in names if not hasattr(self.native, name)]
        return f"{missing[0]}() is missing there" if missing else None

    def _hand_in_threads(self) -> bool:
        """torch's own thread pool, so that `torch.set_num_threads` rules and no second pool exists."""
        folder = Path(torch.__file__).parent / "lib"
        for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
            if (folder / name).is_file():
                torch_cpu = ctypes.CDLL(str(folder / name))
                functions = [torch_cpu.torch_parallel_for, torch_cpu.torch_get_num_threads]
                self.native.mk_set_threads(*(ctypes.cast(f, ctypes.c_void_p) for f in functions))
                return True
        return False


@cache
def _load() -> Library | KernelsMissingError:
    try:
        return Library()
    except KernelsMissingError as error:
        return error


def library() -> Library:
    """The loaded kernels; raises `KernelsMissingError`, an `ImportError`, where there are none."""
    found = _load()
    if isinstance(found, KernelsMissingError):
        raise found
    return found


def why_missing() -> str | None:
    """None where the kernels are there, otherwise the reason in one line."""
    found = _load()
    return str(found) if isinstance(found, KernelsMissingError) else None


def processor() -> tuple[str, str]:
    """The instruction set that the loaded kernels use, and its extension."""
    return library().instruction_set, library().extension


def torch_is_wider() -> bool:
    """Whether torch's products have AVX where the kernels, for want of AVX2, are those of any machine."""
    return library().usable == ["plain"] and bool(library()._ask("can_run", "avx"))


def torch_is_narrower() -> bool:
    """Whether torch's float32 products have vectors of half the kernels' width: MKL's on processors of AMD."""
    found = library()
    return torch.backends.mkl.is_available() and bool(found._ask("mkl_is_narrow", found.instruction_set))


# A compiler asks once, instead of tracing how a library is loaded. This is all that
# `torch.compiler.assume_constant_result` does, which would import the whole compiler here.
for ask in (why_missing, processor, torch_is_wider, torch_is_narrower):
    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _function(struct: type[Struct]) -> Callable[[Struct], int]:
    return library().function(struct)


def run(arguments: Struct) -> None:
    """Runs the kernel that takes these arguments. What they point to has to live until it returns."""
    status = _function(type(arguments))(arguments)
    if status:
        kind, why = STATUS[status]
        raise kind(f"{arguments.kernel} {why}")


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _find() -> Path:
    asked = os.environ.get("MAMBAKIT_KERNELS")
    if asked == "none":
        raise KernelsMissingError("MAMBAKIT_KERNELS=none asks for none")
    if asked:
        if not Path(asked).is_file():
            raise KernelsMissingError(f"MAMBAKIT_KERNELS names {asked}, which is no file")
        return Path(asked)
    for name in ("_native.abi3.so", "_native.so"):
        path = Path(__file__).with_name(name)
        if path.is_file():
            return path
    raise KernelsMissingError(
        "they were not built when mambakit was installed; install a C++ compiler (GCC or Clang) and "
        "reinstall with --no-cache-dir"
    )
