"""Official functions given tensors of other kinds than plain ones end well, or in one line of ours."""

import random

import pytest
import torch.distributed as dist

from fuzz_calls import AS_ELSEWHERE, is_ours
from fuzz_compat import FUNCTIONS, made
from fuzz_kinds import KINDS, of_kind, one_rank
from fuzz_kinds import made as if_torch_makes


@pytest.fixture
def ranks():
    """For shares of tensors."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    one_rank.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_one_tensor_of_another_kind(function, kind, ranks):
    """One of them, and all but one, with every tensor that the function takes, and without each optional one."""
    needed, optional, options = FUNCTIONS[function]
    for left_out in (None, *optional):
        shapes = {name: shape for name, shape in (needed | optional).items() if name != left_out}
        chosen = {name: values[0] for name, values in options.items()}
        if "seq_idx" in shapes and "return_final_states" in chosen:
            chosen["return_final_states"] = False  # packed sequences of a convolution have none
        plain = {name: made(shape, random.Random(name)) for name, shape in shapes.items()}
        others = {name: if_torch_makes(lambda t=t: of_kind(kind, t), t) for name, t in plain.items()}
        for name in plain:
            for given in ({**plain, name: others[name]}, {**others, name: plain[name]}):
                try:
                    function(**{n: t.clone() if t is plain[n] else t for n, t in given.items()}, **chosen)
                except Exception as error:
                    meant = isinstance(error, ValueError) and is_ours(error)
                    if not meant and not any(told in str(error) for told in AS_ELSEWHERE):
                        raise
