"""What tests of several ranks share: how they are started, and what they compare."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

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


def one_process(rank, ranks, folder, *checks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for check in checks:
        check(mesh)
    dist.destroy_process_group()


def on_ranks(ranks, folder, *checks):
    """Each check on all of them, with their mesh."""
    spawn(one_process, (ranks, folder, *checks), nprocs=ranks)
