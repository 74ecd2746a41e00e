"""Scripts with hard-coded devices on the CPU: what says "cuda" is redirected, and reported."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Event:
    """A moment, measured by the clock."""

    def __init__(self, *args: Any, **options: Any):
        self.moment = 0.0

    def record(self, stream: Any = None) -> None:
        self.moment = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds."""
        return 1000 * (end.moment - self.moment)

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Stream(nullcontext[None]):
    """Everything runs in order."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__()

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class OneGenerator(type):
    """So that `isinstance` knows the real ones."""

    def __instancecheck__(cls, other: Any) -> bool:
        return isinstance(other, REAL_GENERATOR)


REAL_GENERATOR, REAL_LOAD = torch.Generator, torch.load


ANSWERS: dict[str, Any] = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_name": "CPU",
    "get_device_capability": (8, 0),
    "get_arch_list": [],
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (0, 0),
    "utilization": 0,
}
IGNORED = (
    "init synchronize empty_cache ipc_collect set_device reset_peak_memory_stats reset_max_memory_allocated "
    "set_per_process_memory_fraction"
)
SEED, NEW_SEED = torch.default_generator.manual_seed, torch.default_generator.seed
SEEDS = {"manual_seed": SEED, "manual_seed_all": SEED, "seed": NEW_SEED, "seed_all": NEW_SEED}


def is_gpu(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def on_cpu(value: Any) -> Any:
    return "cpu" if is_gpu(value) else value


class Redirect(TorchFunctionMode):
    """Devices in the arguments of torch's functions and tensors' methods."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.cuda:
            self.note(".cuda()")
            return args[0]
        if name == "pin_memory":
            self.note(".pin_memory()")
            return args[0]
        if name == "to" and len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
            self.note(f".to({args[1]})")
            args = (args[0], "cpu", *args[2:])
        if any(map(is_gpu, args)) or is_gpu(kwargs.get("device")):
            self.note('device "cuda"')
            args, kwargs = tuple(map(on_cpu, args)), {k: on_cpu(v) for k, v in kwargs.items()}
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            self.note("is_cuda")
            return True
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[list[str]]:
    """Until it ends, code that asks for a GPU gets the CPU. Yields what has been redirected, each once, as it happens.

    Tensors made on "cuda", `.cuda()`, `torch.cuda.synchronize`, `Event`, `device`, `stream`, autocast and gradient
    scalers for "cuda", seeds, questions about the GPU. Not thread-safe: it replaces functions of torch.
    """
    seen: list[str] = []

    def note(what: str) -> None:
        if what not in seen:
            seen.append(what)

    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        if hasattr(owner, name):
            undo.append((owner, name, owner.__dict__.get(name, MISSING)))
            setattr(owner, name, value)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def called(*args: Any, **options: Any) -> Any:
            note(name)
            return function(*args, **options)

        return called

    for name, answer in ANSWERS.items():
        put(torch.cuda, name, noted(f"torch.cuda.{name}()", lambda *_, answer=answer, **__: answer))
    for name in IGNORED.split():
        put(torch.cuda, name, noted(f"torch.cuda.{name}()", lambda *_, **__: None))
    for name, function in SEEDS.items():
        put(torch.cuda, name, noted(f"torch.cuda.{name}()", lambda *seed, function=function: void(function(*seed))))
    for name in ("device", "stream", "device_of"):
        put(torch.cuda, name, noted(f"torch.cuda.{name}()", lambda *_, **__: nullcontext()))
    for name in ("current_stream", "default_stream"):
        put(torch.cuda, name, noted(f"torch.cuda.{name}()", lambda *_, **__: Stream()))
    for name, made in (("Stream", Stream), ("Event", Event)):
        put(torch.cuda, name, noting(made, f"torch.cuda.{name}", note))
    put(torch.nn.Module, "cuda", noted("Module.cuda()", lambda module, device=None: module))
    put(torch.nn.Module, "to", module_to(torch.nn.Module.to, note))
    put(torch, "Generator", generator(note))
    put(torch, "load", load(note))
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Bool"):
        put(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    put_autocast(put, note)
    try:
        with Redirect(note):
            yield seen
    finally:
        for owner, name, value in reversed(undo):
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


MISSING = object()


def void(result: Any) -> None:
    """Nothing, whatever came out."""


def noting(made: type, name: str, note: Callable[[str], None]) -> type:
    """A class that says when one is made of it."""

    class Noting(made):
        def __init__(self, *args: Any, **options: Any):
            note(name)
            super().__init__(*args, **options)

    Noting.__name__ = made.__name__
    return Noting


def module_to(real: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(real)
    def to(self: Any, *args: Any, **options: Any) -> Any:
        first_is_index = bool(args) and isinstance(args[0], int) and not isinstance(args[0], bool)
        if first_is_index or any(map(is_gpu, args)) or is_gpu(options.get("device")):
            note('device "cuda"')
            args = ("cpu", *args[1:]) if first_is_index else tuple(map(on_cpu, args))
            options = {k: on_cpu(v) for k, v in options.items()}
        return real(self, *args, **options)

    return to


def generator(note: Callable[[str], None]) -> type:
    class Generator(metaclass=OneGenerator):
        def __new__(cls, device: Any = "cpu") -> Any:
            if is_gpu(device):
                note('Generator("cuda")')
            return REAL_GENERATOR(on_cpu(device))

    return Generator


def load(note: Callable[[str], None]) -> Callable[..., Any]:
    """`torch.load` to the CPU unless a function or table says where to."""

    @functools.wraps(REAL_LOAD)
    def loaded(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        if is_gpu(map_location):
            note('torch.load(map_location="cuda")')
        elsewhere = "cpu" if map_location is None or is_gpu(map_location) else map_location
        return REAL_LOAD(f, elsewhere, *args, **options)

    return loaded


def put_autocast(put: Callable[..., None], note: Callable[[str], None]) -> None:
    """Autocast and gradient scalers for "cuda" become those of the CPU, in the dtype that a GPU has."""
    real_init, real_scaler = torch.amp.autocast.__init__, torch.amp.GradScaler.__init__

    @functools.wraps(real_init)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        if is_gpu(device_type):
            note('autocast("cuda")')
            dtype = torch.float16 if dtype is None else dtype
        real_init(self, on_cpu(device_type), dtype, *args, **options)

    @functools.wraps(real_scaler)
    def scaler(self: Any, device: Any = "cuda", *args: Any, **options: Any) -> None:
        if is_gpu(device):
            note('GradScaler("cuda")')
        real_scaler(self, str(on_cpu(device)), *args, **options)

    put(torch.amp.autocast, "__init__", init)
    put(torch.amp.GradScaler, "__init__", scaler)
