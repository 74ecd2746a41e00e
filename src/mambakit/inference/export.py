"""A language model as programs for other runtimes: `torch.export`, ONNX, AOTInductor. See docs/export.md.

Two programs with the state as explicit tensors. `prefill` takes several tokens, `step` takes one:

    (ids_bs, *state) -> (logits_bsw, *state)        (ids_b, *state) -> (logits_bw, *state)
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mambakit.models.language_model import LanguageModel
from mambakit.models.quantization import quantized_in
from mambakit.ops.backends import use_backend
from mambakit.ops.decompositions import DECOMPOSITIONS
from mambakit.optional import need

Program = torch.export.ExportedProgram


class WithState(nn.Module):
    """The model as a function of ids and a flat list of tensors."""

    def __init__(self, model: LanguageModel, one_token: bool):
        super().__init__()
        self.model, self.one_token = model, one_token
        self.outline = model.fresh_cache(1)

    def forward(self, ids: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        ids_bs = ids[:, None] if self.one_token else ids
        logits_bsw, cache = self.model(ids_bs, filled(self.outline, state))
        return logits_bsw[:, 0] if self.one_token else logits_bsw, *flat(cache)


def flat(cache: Any) -> list[Tensor]:
    """The tensors of a cache in the order of `state_names`."""
    return [tensor for _, tensor in named(cache, "")]


def named(cache: Any, name: str) -> list[tuple[str, Tensor]]:
    """The tensors of a cache with the way to each, of field names and numbers."""
    if isinstance(cache, Tensor):
        return [(name, cache)]
    if not isinstance(cache, tuple):
        return []
    labels = getattr(cache, "_fields", range(len(cache)))
    return [found for label, part in zip(labels, cache, strict=True) for found in named(part, f"{name}_{label}")]


def filled(outline: Any, state: tuple[Tensor, ...]) -> Any:
    """A cache of `outline`'s structure and settings with these tensors; the opposite of `flat`."""
    tensors = iter(state)

    def fill(part: Any) -> Any:
        if isinstance(part, Tensor):
            return next(tensors)
        if not isinstance(part, tuple):
            return part
        parts = [fill(inner) for inner in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)

    return fill(outline)


def state_names(model: LanguageModel) -> list[str]:
    """`layer0_ssm_bhpr` and so on: the letters are the axes, the first is the batch."""
    check_exportable(model)
    return [name for i, one in enumerate(model.fresh_cache(1)) for name, _ in named(one, f"layer{i}")]


def fresh_state(model: LanguageModel, batch: int) -> list[Tensor]:
    """What the first call starts from."""
    check_exportable(model)
    return [tensor.detach().clone() for tensor in flat(model.fresh_cache(batch))]


def grows(cache: Any) -> bool:
    return isinstance(cache, tuple) and (hasattr(cache, "grows") or any(map(grows, cache)))


def check_exportable(model: LanguageModel) -> None:
    if not isinstance(model, LanguageModel):
        raise ValueError(f"only a LanguageModel can be exported this way, got {type(model).__name__}")
    if quantized_in(model):
        raise ValueError("quantized models are not exported; export the one it was made from")
    cache = model.fresh_cache(1)
    if hasattr(cache, "_fields"):
        raise ValueError("models with class latents carry cursors besides their state; export a model without them")
    growing = [f"layer{i}" for i, one in enumerate(cache) if grows(one)]
    if growing:
        told = f"the keys and values of {', '.join(growing)} grow with the text, and a program's state has fixed sizes"
        raise ValueError(f"{told}; export a model without attention")


def export_prefill(model: LanguageModel, tokens: int | None = None) -> Program:
    """A program for any number of rows, of exactly `tokens` tokens, or of any number from `fewest_tokens` on."""
    if tokens is not None and tokens < 2:
        raise ValueError(f"prefill of {tokens} tokens; it takes at least 2, export_step takes one")
    check_exportable(model)
    example = torch.zeros(2, EXAMPLE_TOKENS if tokens is None else tokens, dtype=torch.int64)
    return _export(model, example, one_token=False, fewest=fewest_tokens(model) if tokens is None else None)


def export_step(model: LanguageModel) -> Program:
    """A program for one token of any number of rows."""
    return _export(model, torch.zeros(2, dtype=torch.int64), one_token=True)


EXAMPLE_TOKENS = 300
"""More than a chunk of any scan, and no multiple of one."""


def fewest_tokens(model: LanguageModel) -> int:
    """That a prefill of a free length takes: those that the longest filter reads, whose window is then all new."""
    kernels = [getattr(getattr(part, "config", None), "conv_kernel", 1) for part in model.modules()]
    return max(3, *kernels)


def save_onnx(model: LanguageModel, folder: str | os.PathLike[str], *, tokens: int | None = None) -> tuple[Path, Path]:
    """Write `prefill.onnx` and `step.onnx`; inputs and outputs are `ids`, `logits` and the names of `state_names`.

    Their free axes are called `batch` and, unless `tokens` gives a length, `sequence`. The state comes out as `next_`
    plus its name. Needs the packages of the extra `export`.
    """
    # Without them torch fails far from here.
    need("writing ONNX", "onnx", "onnxscript")
    folder = Path(folder)
    names = state_names(model)
    programs = {"prefill": export_prefill(model, tokens), "step": export_step(model)}
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    files = []
    for name, program in programs.items():
        file = folder / f"{name}.onnx"
        written = torch.onnx.export(
            program.run_decompositions(DECOMPOSITIONS),
            (),
            input_names=["ids", *names],
            output_names=["logits", *(f"next_{state}" for state in names)],
            dynamo=True,
            verbose=False,
        )
        assert written is not None
        written.rename_axes({**_free_axes(program)})
        written.save(file, external_data=size > MAX_IN_ONE_FILE)
        files.append(file)
    return files[0], files[1]


MAX_IN_ONE_FILE = 1 << 30
"""Bytes of weights beyond which ONNX has them in a file of their own; it can hold two gigabytes."""


def _free_axes(program: Program) -> dict[str, str]:
    """What torch calls the free axes of the ids, and what we do."""
    ids = next(node for node in program.graph.nodes if node.op == "placeholder" and node.name == "ids")
    axes = zip(ids.meta["val"].shape, ("batch", "sequence"), strict=False)
    return {str(size): name for size, name in axes if not isinstance(size, int)}


def save_step_package(model: LanguageModel, file: str | os.PathLike[str]) -> Path:
    """Compile `step` with AOTInductor into a `.pt2` package that `torch._inductor.aoti_load_package` runs."""
    file = Path(file)
    if file.suffix != ".pt2":
        raise ValueError(f"{file.name}: a package of AOTInductor has to end in .pt2")
    check_compiler()
    program = export_step(model)
    file.parent.mkdir(parents=True, exist_ok=True)
    return Path(torch._inductor.aoti_compile_and_package(program, package_path=str(file)))


def check_compiler() -> None:
    """ValueError if there is none for AOTInductor to use."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise ValueError("AOTInductor compiles C++, and no compiler was found; install g++ or set CXX") from error


def _export(model: LanguageModel, ids: Tensor, *, one_token: bool, fewest: int | None = None) -> Program:
    check_exportable(model)
    state = fresh_state(model, len(ids))
    ids = ids.to(state[0].device)
    batch = torch.export.Dim("batch", min=1)
    free = {0: batch} if fewest is None else {0: batch, 1: torch.export.Dim("sequence", min=fewest)}
    # Fused kernels are for this machine; a program is for any.
    with torch.no_grad(), use_backend("torch"):
        return torch.export.export(
            WithState(model, one_token).eval(),
            (ids, *state),
            dynamic_shapes={"ids": free, "state": tuple({0: batch} for _ in state)},
        )
