# type: ignore  # of what Triton does not call its own
"""For pytest processes with `TRITON_INTERPRET=1`: the interpreter without what it repeats at every call."""

from dataclasses import replace

import numpy as np
from triton.runtime import interpreter

# Infinities and what is no number come and go without a word on a GPU; what they do to results is what tests look at.
np.seterr(all="ignore")
patched: set[int] = set()
dtypes: dict[str, np.dtype] = {}


def start(self, *args, **kwargs):
    patched.clear()
    return run_grid(self, *args, **kwargs)


def np_dtype(kind):
    """What stands for a dtype of the language, from a table that Triton makes anew for each question."""
    kind = kind.scalar
    if kind.name not in dtypes:
        dtypes[kind.name] = find_dtype(kind)
    return dtypes[kind.name]


def call(self, *args, **kwargs):
    """A function of a kernel. Triton patches its language anew for each call; once per file and launch will do."""
    names = self.fn.__globals__
    if id(names) not in patched:
        interpreter._patch_lang(self.fn)
        patched.add(id(names))
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


# Every sum of integers is computed a second time to see whether it fits, which is nearly half of all time. Programs
# whose numbers are large, test_triton_addresses.py, ask for it.
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)
find_dtype, interpreter._get_np_dtype = interpreter._get_np_dtype, np_dtype
run_grid, interpreter.GridExecutor.__call__ = interpreter.GridExecutor.__call__, start
interpreter.InterpretedFunction.__call__ = call
