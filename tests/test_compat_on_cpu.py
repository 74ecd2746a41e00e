"""Scripts with hard-coded devices on the CPU."""

import subprocess
import sys

import pytest
import torch

from mambakit.compat import cuda_on_cpu
from mambakit.compat.finder import has_gpu
from test_compat import run  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SCRIPT = """
import torch
from mamba_ssm import Mamba
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.cuda.manual_seed_all(0)
block = Mamba(16).to("cuda")
x = torch.randn(2, 5, 16, device="cuda").cuda(non_blocking=True)
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
start.record()
with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(device), torch.autocast("cuda", dtype=torch.bfloat16):
    y = block(x)
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
print(y.shape, y.device, x.is_cuda)
"""


def test_a_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mambakit.compat", "--cpu", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([2, 5, 16]) cpu True\n"
    said = done.stderr.splitlines()[-1]
    for what in ('device "cuda"', ".cuda()", "torch.cuda.Event", 'autocast("cuda")', "torch.cuda.synchronize()"):
        assert said.count(what) == 1


def test_it_is_opt_in_and_says_what_it_did_when_a_script_fails(tmp_path, run):  # noqa: F811
    (tmp_path / "script.py").write_text("import torch\ntorch.zeros(2, device='cuda')\nraise SystemExit(3)\n")
    code, _, err = run("--cpu", "--force", tmp_path / "script.py", cwd=tmp_path)
    assert (code, err) == (3, 'mambakit.compat: redirected to the CPU: device "cuda"\n')
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        run(tmp_path / "script.py", cwd=tmp_path)
    (tmp_path / "script.py").write_text("")
    assert "nothing asked for a GPU" in run("--cpu", tmp_path / "script.py", cwd=tmp_path)[2]


CALLS = {
    "to": lambda: torch.zeros(2).to("cuda:1", torch.float64),
    "to an index": lambda: torch.zeros(2).to(0),
    "module": lambda: torch.nn.Linear(2, 2, device="cuda").cuda().to(0).to(torch.device("cuda")).weight,
    "makers": lambda: torch.cat([torch.tensor([1.0], device="cuda"), torch.empty(0, device=torch.device("cuda", 0))]),
    "like": lambda: torch.ones_like(torch.zeros(2), device="cuda"),
    "generator": lambda: torch.randn(2, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda"),
    "pinned": lambda: torch.zeros(2, pin_memory=True).pin_memory().cuda(),
    "typed": lambda: torch.cuda.FloatTensor([1.0]),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(2, device="cuda")),
}


@pytest.mark.parametrize("name", CALLS)
def test_tensors(name):
    with cuda_on_cpu():
        assert CALLS[name]().device.type == "cpu"


def test_training_with_autocast_and_scaler():
    with cuda_on_cpu() as seen:
        module = torch.nn.Linear(4, 4).cuda()
        scaler = torch.cuda.amp.GradScaler()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with torch.autocast("cuda"):
            out = module(torch.ones(1, 4, device="cuda"))
        assert out.dtype == torch.float16
        scaler.scale(out.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert 'autocast("cuda")' in seen
    assert 'GradScaler("cuda")' in seen


def test_loading_what_lay_on_a_gpu(tmp_path):
    torch.save(torch.arange(3), tmp_path / "x.pt")
    with cuda_on_cpu() as seen:
        assert torch.load(tmp_path / "x.pt", map_location="cuda", weights_only=True).tolist() == [0, 1, 2]
    assert seen == ['torch.load(map_location="cuda")']


def test_everything_is_as_before_afterwards():
    owners = (torch, torch.cuda, torch.nn.Module, torch.amp.autocast, torch.amp.GradScaler)
    before = [dict(vars(owner)) for owner in owners]
    with cuda_on_cpu() as seen:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() >= (7, 0)
        assert isinstance(torch.default_generator, torch.Generator)
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    with pytest.raises(KeyError), cuda_on_cpu():
        raise KeyError
    assert seen
    assert [dict(vars(owner)) for owner in owners] == before
    assert torch.cuda.is_available() == has_gpu()
