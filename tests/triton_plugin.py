# type: ignore  # of what Triton does not call its own
"""For pytest processes with `TRITON_INTERPRET=1`: the interpreter without what it repeats at every call."""

import numpy as np
from triton.runtime import interpreter

# Infinities and what is no number come and go without a word on a GPU; what they do to results is what tests look at.
np.seterr(all="ignore")
patched: set[int] = set()


def start(self, *args, **kwargs):
    patched.clear()
    return run_grid(self, *args, **kwargs)


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


run_grid, interpreter.GridExecutor.__call__ = interpreter.GridExecutor.__call__, start
interpreter.InterpretedFunction.__call__ = call
