"""An operation: defined once, run by whoever can.

Its contract, checks and plain form are functions of the operation's own file. What is here is the rest, shared by all:
the choice of who runs a call, and for kernels one torch operator with its fake and its derivative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mambakit.ops.backends import (
    BACKENDS,
    PLAIN_TENSORS,
    TORCH,
    Backend,
    _running,
    _Setting,
    asked,
    check_backend,
    nobody_looks_on,
)

LIBRARY = torch.library.Library("mambakit", "FRAGMENT")
OPERATIONS: dict[str, "Operation"] = {}
Outputs = Sequence[tuple[Tensor, Sequence[int]]]
WhyNot = Callable[..., str | None]
"""Of the tensors of a call: None if the kernel can run it, else one clause for a person."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """What a backend registers behind an operation."""

    operation: "Operation"
    backend: Backend
    forward: Callable[..., Any]
    """Of the operation's inputs, in their order; a list of tensors for a torch operator."""
    backward: Callable[..., Sequence[Tensor | None]] | None
    """Of the outputs' gradients, the inputs, and which gradients are wanted; None for others."""
    own_why_not: WhyNot | None
    casts: bool
    """Its floating-point inputs are float32, whatever the call's are."""
    narrow: tuple[int, ...]
    """But for these: where all of them are bfloat16, they stay so."""

    def why_not(self, tensors: Sequence[Tensor | None]) -> str | None:
        reason = self.backend.why_not(tensors)
        if reason is None and self.backward is None and torch.is_grad_enabled():
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return "it has no gradient, and one is wanted"
        if reason is None and self.own_why_not is not None:
            return self.own_why_not(*tensors)
        return reason

    def dtypes(self, inputs: Sequence[Any]) -> list[torch.dtype]:
        """What a kernel that casts reads the floating-point inputs of a call in."""
        assert isinstance(self.operation, TorchOperation)
        given = [inputs[i].dtype for i in self.narrow if inputs[i] is not None]
        data = torch.bfloat16 if given and all(dtype == torch.bfloat16 for dtype in given) else torch.float32
        return [data if i in self.narrow else torch.float32 for i in range(self.operation.floats)]

    def __call__(self, *inputs: Any) -> Any:
        """By way of the torch operator where somebody has to look on: autograd, a compiler, a tensor's subclass.

        Otherwise directly: the operator's bookkeeping takes longer than a token's work.
        """
        operation = self.operation
        if not isinstance(operation, TorchOperation):
            return self.forward(*inputs)
        if self.casts:
            wanted = self.dtypes(inputs)
            floats = (
                t if t is None or t.dtype == dtype else t.to(dtype) for t, dtype in zip(inputs, wanted, strict=False)
            )
            inputs = (*floats, *inputs[operation.floats :])
        if nobody_looks_on():
            return list(Direct.apply(self, *inputs))
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return operation.operator(*inputs, self.backend.name)
        for tensor in inputs[: operation.tensors]:
            if tensor is not None and type(tensor) not in PLAIN_TENSORS:
                return operation.operator(*inputs, self.backend.name)
        return self.forward(*inputs)


class Direct(torch.autograd.Function):
    """A kernel with its gradient, without the operator around it, whose bookkeeping takes longer than small kernels."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, *inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        assert isinstance(kernel.operation, TorchOperation)
        count = kernel.operation.tensors
        ctx.kernel, ctx.options = kernel, inputs[count:]
        ctx.save_for_backward(*inputs[:count])
        return tuple(kernel.forward(*inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kernel, inputs, floats = ctx.kernel, ctx.saved_tensors, ctx.kernel.operation.floats
        needs = list(ctx.needs_input_grad[1 : 1 + floats])
        found = kernel.backward(list(grads), *inputs, *ctx.options, needs)
        wanted = (d if need else None for d, need in zip(found, needs, strict=True))
        return None, *wanted, *[None] * (len(inputs) - floats + len(ctx.options))


class Choice(NamedTuple):
    """Who ran an operation, and why nobody else did."""

    operation: str
    ran: str
    passed_over: dict[str, str]

    def __str__(self) -> str:
        others = "; ".join(f"{backend}: {reason}" for backend, reason in self.passed_over.items())
        return f"{self.operation}: {self.ran}" + (f" ({others})" if others else "")


class Operation:
    """A name that backends register kernels for."""

    def __init__(self, name: str):
        self.name = name
        self.kernels: dict[str, Kernel] = {}
        OPERATIONS[name] = self

    def implement(
        self,
        backend: Backend,
        forward: Callable[..., Any],
        backward: Callable[..., Sequence[Tensor | None]] | None = None,
        why_not: WhyNot | None = None,
        casts: bool = False,
        narrow: tuple[int, ...] = (),
    ) -> Kernel:
        """Register a kernel; a backend has one per operation."""
        kernel = Kernel(self, backend, forward, backward, why_not, casts, narrow)
        if self.kernels.setdefault(backend.name, kernel) is not kernel:
            raise ValueError(f"backend {backend.name!r} already has a kernel for {self.name}")
        return kernel

    def choose(self, backend: str, *tensors: Tensor | None) -> Kernel | None:
        """Who runs a call on `tensors`: a kernel, or None for the plain form.

        A backend asked for in the call runs or raises `ValueError`; one asked for around it (`use_backend`) too, unless
        it has no kernel for this operation at all.
        """
        name = asked() if backend == "auto" else backend
        if name == "torch":
            return self._note(None, {})
        if name == "auto":
            return self._first(tensors)
        check_backend(name)
        kernel = self.kernels.get(name)
        reason = BACKENDS[name].why_missing() if kernel is None else kernel.why_not(tensors)
        if kernel is None and reason is None:
            if backend == "auto":
                return self._note(None, {name: f"it has no {self.name}"})
            reason = f"it has no {self.name}"
        if reason is not None:
            raise ValueError(f'backend "{name}" cannot run {self.name}: {reason}; "auto" and "torch" run anywhere')
        if kernel is not None:
            kernel.backend.warn(self.name, tensors)
        return self._note(kernel, {})

    def offer(self, *tensors: Tensor | None) -> Kernel | None:
        """The first kernel that can run a call and is not ruled out by `use_backend`; None without an error otherwise.

        For what has more than one good way: a product with few rows, a whole step in one kernel.
        """
        return self._first(tensors, asked())

    def _first(self, tensors: Sequence[Tensor | None], asked_for: str = "auto") -> Kernel | None:
        passed_over = {}
        for name in self.kernels if asked_for == "auto" else (asked_for,):
            kernel = self.kernels.get(name)
            if kernel is None or kernel.backend is TORCH:
                continue
            if asked_for == "auto" and not kernel.backend.is_for(tensors):
                continue
            reason = kernel.why_not(tensors)
            if reason is None and asked_for == "auto":
                reason = kernel.backend.why_not_auto(self.name, tensors)
            if reason is None:
                return self._note(kernel, passed_over)
            passed_over[name] = reason
        return self._note(None, passed_over)

    def _note(self, kernel: Kernel | None, passed_over: dict[str, str]) -> Kernel | None:
        notes = getattr(_running, "notes", None)
        if notes is not None:
            notes.append(Choice(self.name, "torch" if kernel is None else kernel.backend.name, passed_over))
        return kernel


class TorchOperation(Operation):
    """An operation whose kernels stand behind one torch operator, `mambakit::NAME(inputs, str backend) -> Tensor[]`.

    `inputs` is the schema, tensors first. Of these the first `floats` have gradients, each of its input's shape and
    dtype. `outputs` gives an input for each output, whose dtype and device it has, and its shape. `check` raises
    `ValueError` for inputs whose sizes do not fit: the operator is open to all, and kernels trust what they get. `twin`
    is a plain form with the same inputs, if the operation shall be differentiable more than once.
    """

    def __init__(
        self,
        name: str,
        inputs: str,
        outputs: Callable[..., Outputs],
        *,
        check: Callable[..., object],
        floats: int = 0,
        twin: Callable[..., list[Tensor]] | None = None,
    ):
        super().__init__(name)
        self.outputs, self.check, self.floats, self.twin = outputs, check, floats, twin
        arguments = inputs.split(", ")
        self.names = [argument.split()[-1] for argument in arguments]
        self.tensors = sum(argument.startswith("Tensor") for argument in arguments)
        self.required = [i for i, argument in enumerate(arguments) if argument.startswith("Tensor ")]
        LIBRARY.define(f"{name}({inputs}, str backend) -> Tensor[]")
        LIBRARY.impl(name, self._forward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"mambakit::{name}", self._fake, lib=LIBRARY)
        self.operator = getattr(torch.ops.mambakit, name).default
        if floats:
            back = f"{name}_backward"
            LIBRARY.define(f"{back}(Tensor?[] grads, {inputs}, bool[] needs, str backend) -> Tensor[]")
            LIBRARY.impl(back, self._backward, "CompositeExplicitAutograd")
            torch.library.register_fake(f"mambakit::{back}", self._fake_backward, lib=LIBRARY)
            torch.library.register_autograd(f"mambakit::{back}", self._refuse, lib=LIBRARY)
            self.operator_backward = getattr(torch.ops.mambakit, back).default
            torch.library.register_autograd(
                f"mambakit::{name}", self._differentiate, setup_context=self._keep_inputs, lib=LIBRARY
            )

    def run_plainly(self, *inputs: Any) -> list[Tensor]:
        """In torch's operators, behind the torch operator: for a plain form with a derivative of its own."""
        return self.operator(*inputs, TORCH.name)

    def _kernel(self, backend: str) -> Kernel:
        kernel = self.kernels.get(backend)
        reason = f"it has no {self.name}" if kernel is None else kernel.backend.why_missing()
        if kernel is None or reason is not None:
            raise ValueError(f'backend "{backend}" cannot run {self.name}: {reason}')
        return kernel

    def _expected(self, inputs: Sequence[Any]) -> Outputs:
        """`outputs` of what anybody may have given; torch takes None for any tensor."""
        for i in self.required:
            if inputs[i] is None:
                raise ValueError(f"{self.names[i]} of {self.name} has to be a tensor, got None")
        try:
            return self.outputs(*inputs)
        except (ValueError, IndexError) as error:
            shapes = ", ".join(f"{self.names[i]} {tuple(inputs[i].shape)}" for i in self.required)
            raise ValueError(f"{self.name} needs other axes than these: {shapes}") from error

    def _check(self, kernel: Kernel, inputs: Sequence[Any], grads: Sequence[Tensor] = ()) -> None:
        """Anybody may call an operator, and kernels trust what they get; torch's operators see for themselves."""
        expected = self._expected(inputs)
        if kernel.backend is TORCH:
            return
        reason = kernel.backend.why_unreadable((*inputs[: self.tensors], *grads))
        if reason is not None:
            raise ValueError(f'backend "{kernel.backend.name}" cannot run {self.name}: {reason}')
        each = [(dtype,) for dtype in kernel.dtypes(inputs)] if kernel.casts else [kernel.backend.dtypes] * self.floats
        for name, tensor, wanted in zip(self.names, inputs, each, strict=False):
            if tensor is not None and tensor.dtype not in wanted:
                raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, wanted))}")
        self.check(*inputs)
        for i, (grad, (like, shape)) in enumerate(zip(grads, expected, strict=False)):
            if tuple(grad.shape) != tuple(shape) or grad.dtype != like.dtype:
                given = f"is {tuple(grad.shape)} and {grad.dtype}, expected {tuple(shape)} and {like.dtype}"
                raise ValueError(f"grads[{i}] of {self.name} {given}")

    def _forward(self, *inputs_and_backend: Any) -> list[Tensor]:
        *inputs, backend = inputs_and_backend
        kernel = self._kernel(backend)
        self._check(kernel, inputs)
        return kernel.forward(*inputs)

    def _fake(self, *inputs_and_backend: Any) -> list[Tensor]:
        return [like.new_empty(shape) for like, shape in self._expected(inputs_and_backend[:-1])]

    def _backward(self, grads: list[Tensor | None], *inputs_and_options: Any) -> list[Tensor]:
        *inputs, needs, backend = inputs_and_options
        kernel = self._kernel(backend)
        assert kernel.backward is not None, f"{self.name} has gradients, so its kernels have a backward"
        whole = len(grads) == len(self._expected(inputs)) and all(grad is not None for grad in grads)
        if not whole or len(needs) != self.floats:
            raise ValueError(f"{self.name} needs a gradient of every output and {self.floats} entries in needs")
        self._check(kernel, inputs, grads)  # type: ignore[arg-type]  # none is None
        needs = [need and tensor is not None for tensor, need in zip(inputs, needs, strict=False)]
        found = kernel.backward(grads, *inputs, needs)
        nothing = inputs[self.required[0]]
        return [nothing.new_empty(0) if d is None or not need else d for d, need in zip(found, needs, strict=True)]

    def _fake_backward(self, grads: list[Tensor | None], *inputs_and_options: Any) -> list[Tensor]:
        *inputs, needs, _ = inputs_and_options
        self._expected(inputs)
        nothing = inputs[self.required[0]]
        wanted = (tensor if need else None for tensor, need in zip(inputs, needs, strict=False))
        return [nothing.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in wanted]

    def _keep_inputs(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[: self.tensors])
        ctx.options = inputs[self.tensors :]

    def _differentiate(self, ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
        inputs, (*options, backend) = ctx.saved_tensors, ctx.options
        needs = [bool(need) for need in ctx.needs_input_grad[: self.floats]]
        if self.twin is not None and torch.is_grad_enabled():
            # Somebody will differentiate this gradient: the kernels' have none, the twin's has.
            wanted = [t for t, need in zip(inputs, needs, strict=False) if need]
            outputs = self.twin(*inputs, *options)
            pairs = [(y, d) for y, d in zip(outputs, grads, strict=True) if d is not None and y.requires_grad]
            y, d_y = ([pair[i] for pair in pairs] for i in range(2))
            found = iter(torch.autograd.grad(y, wanted, d_y, create_graph=True, allow_unused=True))
            every = [next(found) if need else None for need in needs]
        else:
            every = self.operator_backward(grads, *inputs, *options, needs, backend)
        wanted = (d if need else None for d, need in zip(every, needs, strict=True))
        return *wanted, *[None] * (len(inputs) - self.floats + len(options) + 1)

    def _refuse(self, ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"{self.name} has no second derivative here; see docs/algorithms.md for what has")


def explain(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Choice]:
    """Call `call(*args, **kwargs)` and tell which backend ran each of its operations, and why no other did.

    `print(*mk.explain(model, ids), sep="\\n")`. An operation comes once for every different answer.

    Examples:
        >>> block = mk.Mamba2(mk.Mamba2Config(d_model=64, per_head_dim=16))
        >>> "ssd" in [choice.operation for choice in mk.explain(block, torch.randn(1, 100, 64))]
        True
    """
    if not callable(call):
        raise ValueError(f"call is a {type(call).__name__}, expected a function or a module")
    notes: list[Choice] = []
    with _Setting("notes", notes):
        call(*args, **kwargs)
    return [choice for i, choice in enumerate(notes) if choice not in notes[:i]]
