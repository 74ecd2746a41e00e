"""The official package's collectives and shared linear maps: two processes against one."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from test_compat import installed, official  # noqa: F401 - a fixture

UTILS, PARALLEL = "mamba_ssm.distributed.distributed_utils", "mamba_ssm.distributed.tensor_parallel"
RANKS, ROWS, WIDTH, HIDDEN = 2, 6, 4, 8


def shared(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(rank, rows=ROWS):
    return shared(rows, WIDTH, seed=rank)


def test_shares_of_a_width():
    share = official(UTILS, "get_dim_for_local_rank")
    for width, size, multiple in ((10, 4, 1), (96, 4, 16), (7, 2, 1)):
        shares = [share(width, size, rank, multiple) for rank in range(size)]
        assert sum(shares) == width
        assert all(s % multiple == 0 for s in shares)
        assert max(shares) - min(shares) <= multiple


def collectives(rank, group):
    everyone = [inputs(r) for r in range(RANKS)]
    mine = inputs(rank).requires_grad_()
    half = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
    upstream = [shared(RANKS * ROWS, WIDTH, seed=10 + r) for r in range(RANKS)]
    wanted = {
        "all_gather": (torch.cat(everyone), torch.stack(upstream).sum(0)[rank * ROWS : (rank + 1) * ROWS]),
        "reduce_scatter": (torch.stack(everyone).sum(0)[half], torch.cat([u[: ROWS // RANKS] for u in upstream])),
        "all_reduce": (torch.stack(everyone).sum(0), upstream[rank][:ROWS]),
    }
    for name, (value, gradient) in wanted.items():
        raw, handle = official(UTILS, f"{name}_raw")(mine.detach().clone(), group, async_op=True)
        handle.wait()
        out = official(UTILS, name)(mine, group)
        torch.testing.assert_close(raw, value)
        torch.testing.assert_close(out, value)
        (d_mine,) = torch.autograd.grad(out, mine, upstream[rank][: len(out)])
        torch.testing.assert_close(d_mine, gradient)
    with pytest.raises(ValueError, match="3 rows cannot be divided among 2 processes"):
        official(UTILS, "reduce_scatter_raw")(torch.ones(3, 1), group)


def marked_parameters(rank, group):
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, rank + 1.0)
    torch.nn.init.constant_(model.bias, rank + 1.0)
    model.weight._shared_params = True
    model.bias._sequence_parallel = True
    model.weight.grad, model.bias.grad = (torch.full_like(p, rank + 1.0) for p in (model.weight, model.bias))
    official(UTILS, "sync_shared_params")(model, group)
    official(UTILS, "allreduce_sequence_parallel_grad")(model, group)
    assert (model.weight == 1).all()
    assert (model.bias == rank + 1).all()
    assert (model.weight.grad == rank + 1).all()
    assert (model.bias.grad == 3).all()


def linear_maps(rank, group):
    """Columns, then rows: together the two maps of one process, in both ways to share the sequence."""
    up, down, bias = shared(HIDDEN, WIDTH, seed=20), shared(WIDTH, HIDDEN, seed=21), shared(WIDTH, seed=22)
    columns = slice(rank * HIDDEN // RANKS, (rank + 1) * HIDDEN // RANKS)
    for in_parts in (True, False):
        first = official(PARALLEL, "ColumnParallelLinear")(
            WIDTH, HIDDEN, group, bias=False, sequence_parallel=in_parts, dtype=torch.float64
        )
        second = official(PARALLEL, "RowParallelLinear")(
            HIDDEN, WIDTH, group, sequence_parallel=in_parts, dtype=torch.float64
        )
        assert (second.bias is None) == (rank > 0)
        with torch.no_grad():
            first.weight.copy_(up[columns])
            second.weight.copy_(down[:, columns])
            if second.bias is not None:
                second.bias.copy_(bias)
        whole = torch.cat([inputs(r) for r in range(RANKS)]) if in_parts else inputs(0)
        mine = slice(rank * ROWS, (rank + 1) * ROWS) if in_parts else slice(None)
        x, x_whole = whole[mine].clone().requires_grad_(), whole.clone().requires_grad_()
        y, y_whole = second(first(x)), x_whole @ up.T @ down.T + bias
        torch.testing.assert_close(y, y_whole[mine])
        upstream = shared(*y_whole.shape, seed=23)
        y.backward(upstream[mine])
        y_whole.backward(upstream)
        torch.testing.assert_close(x.grad, x_whole.grad[mine])
        torch.testing.assert_close(first.weight.grad, ((upstream @ down).T @ whole)[columns])
    with pytest.raises(ValueError, match="out_features = 8 has to be a multiple of multiple_of = 3"):
        official(PARALLEL, "ColumnParallelLinear")(WIDTH, HIDDEN, group, multiple_of=3)


def one_process(rank, folder):
    from mambakit.compat import install

    torch.set_num_threads(1)
    install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for check in (collectives, marked_parameters, linear_maps):
        check(rank, dist.group.WORLD)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    spawn(one_process, (tmp_path,), nprocs=RANKS)
