"""What tests of several ranks share: how they are started, and what they compare.

`python ranks.py MODULE RANKS FOLDER CHECK...` runs functions of a module on so many ranks. One process imports all that
they need, which takes longer than most checks, and is forked into ranks.
"""

import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

LENGTH = 13
TIGHT = 1e-12


def seeded(*key):
    return torch.Generator().manual_seed(hash(key) % 2**31)


def random(*shape, key, dtype=torch.float64):
    return torch.randn(*shape, generator=seeded(*key), dtype=torch.float64).to(dtype)


def leaves(cache):
    if isinstance(cache, torch.Tensor):
        return [cache] if cache.is_floating_point() else []
    return [leaf for part in cache if not isinstance(part, str) for leaf in leaves(part)]


def positions(cache):
    if isinstance(cache, torch.Tensor):
        return [] if cache.is_floating_point() else [cache]
    return [leaf for part in cache if not isinstance(part, str) for leaf in positions(part)]


def loss_of(y, cache, weight, share=1.0):
    total = (y * weight).sum()
    for i, leaf in enumerate(leaves(cache)):
        total = total + share * (leaf * random(*leaf.shape, key=(i, 3), dtype=leaf.dtype)).sum()
    return total


def close(what, got, wanted, tolerance=TIGHT):
    assert got.shape == wanted.shape, what
    if wanted.numel():
        got, wanted = got.detach(), wanted.detach()
        worst = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
        assert worst <= tolerance, f"{what}: off by {worst:.1e} of the largest"


def options(kind, rows=2):
    """Of the whole sequence."""
    g = seeded(len(kind))
    flags = {
        "mask_bs": torch.rand(rows, LENGTH, generator=g) < 0.7,
        "reset_bs": torch.rand(rows, LENGTH, generator=g) < 0.25,
    }
    if "packed" in kind:
        flags = {name: flag[:1] for name, flag in flags.items()}
    found = {name: flags[name] for name in flags if name.split("_")[0] in kind}
    if "packed" in kind:
        found["cu_seqlens"] = torch.tensor([0, 4, 4, 9, LENGTH])
    return found


def forked(work: Callable[[], None]) -> int:
    """The process id of a child that does this and nothing else."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(child: int) -> int:
    """The exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def one_process(rank, ranks, folder, checks):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for check in checks:
        check(mesh)
    dist.destroy_process_group()


def on_ranks(ranks, folder, *checks):
    """Each check on all of them, with their mesh. What the module's `before` does with their number is there then."""
    [module] = {check.__module__ for check in checks}
    names = [check.__name__ for check in checks]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, __file__, module, str(ranks), str(folder), *names],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def main(name: str, ranks: int, folder: str, *checks: str) -> None:
    # Before the fork, since each rank would import them otherwise.
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor

    torch.set_num_threads(1)
    module = importlib.import_module(name)
    module.before(ranks)
    functions = [getattr(module, check) for check in checks]
    children = [forked(lambda rank=rank: one_process(rank, ranks, folder, functions)) for rank in range(ranks)]
    # One that fails closes its connections, which ends the others.
    codes = [outcome(child) for child in children]
    assert codes == [0] * ranks, codes


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
