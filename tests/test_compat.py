"""`install`, `python -m mambakit.compat`, and which names there are."""

import importlib
import importlib.util
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mambakit.compat import coverage, install, uninstall
from mambakit.compat.__main__ import main
from mambakit.compat.finder import CompatFinder

ROOT = Path(__file__).parents[1]
GALLERY = sorted((ROOT / "examples" / "gallery").glob("*.py"))
MAMBA3 = "mamba_ssm.ops.triton.mamba3"

# What code in the wild imports, module by module.
NAMES = {
    "mamba_ssm": "Mamba Mamba2 Mamba3 MambaLMHeadModel mamba_inner_fn selective_scan_fn __version__",
    "mamba_ssm.modules.mamba_simple": "Mamba Block causal_conv1d_fn selective_scan_fn mamba_inner_fn",
    "mamba_ssm.modules.mamba2": "Mamba2",
    "mamba_ssm.modules.mamba2_simple": "Mamba2Simple",
    "mamba_ssm.modules.mamba3": "Mamba3 heavy_tail_activation",
    "mamba_ssm.modules.block": "Block",
    "mamba_ssm.modules.mlp": "GatedMLP",
    "mamba_ssm.modules.mha": "MHA",
    "mamba_ssm.modules.ssd_minimal": "ssd_minimal_discrete segsum segsum_unstable",
    "mamba_ssm.models.config_mamba": "MambaConfig",
    "mamba_ssm.models.mixer_seq_simple": "MambaLMHeadModel MixerModel create_block _init_weights",
    "mamba_ssm.ops.selective_scan_interface": "selective_scan_fn selective_scan_ref mamba_inner_fn mamba_inner_ref",
    "mamba_ssm.ops.triton.layernorm": "RMSNorm layer_norm_fn rms_norm_fn layer_norm_ref rms_norm_ref",
    "mamba_ssm.ops.triton.layer_norm": "RMSNorm layer_norm_fn rms_norm_fn layer_norm_linear_fn layer_norm_ref",
    "mamba_ssm.ops.triton.layernorm_gated": "RMSNorm LayerNorm rmsnorm_fn layernorm_fn rms_norm_ref",
    "mamba_ssm.ops.triton.selective_state_update": "selective_state_update selective_state_update_ref",
    "mamba_ssm.ops.triton.ssd_combined": (
        "mamba_chunk_scan_combined mamba_split_conv1d_scan_combined mamba_chunk_scan ssd_selective_scan "
        "mamba_split_conv1d_scan_ref mamba_conv1d_scan_ref ssd_chunk_scan_combined_ref"
    ),
    f"{MAMBA3}.mamba3_siso_combined": "mamba3_siso_combined",
    f"{MAMBA3}.mamba3_siso_step": "mamba3_siso_step",
    f"{MAMBA3}.mamba3_mimo_rotary_step": "apply_rotary_qk_inference_fwd apply_rotary_qk_inference_reference",
    f"{MAMBA3}.angle_dt": "angle_dt_fwd",
    "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo": "mamba3_mimo",
    "mamba_ssm.ops.cute.mamba3.mamba3_step_fn": "mamba3_step_fn",
    "mamba_ssm.utils.generation": "InferenceParams GenerationMixin decode sample",
    "mamba_ssm.utils.hf": "load_config_hf load_state_dict_hf",
    "causal_conv1d": "causal_conv1d_fn causal_conv1d_update __version__",
    "causal_conv1d.causal_conv1d_interface": "causal_conv1d_fn causal_conv1d_ref causal_conv1d_update_ref",
    "causal_conv1d.causal_conv1d_varlen": "causal_conv1d_varlen_states causal_conv1d_varlen_states_ref",
}

# The arguments of functions that are others in short, in the official order.
SUMMED = (
    "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
    "prenorm=False"
)
MASKS = "dropout_mask=None, dropout_mask1=None, upcast=False"
NORM = "x, weight, bias, residual=None, eps=1e-06, prenorm=False"
GATED = "x, weight, bias, z=None, eps=1e-06, group_size=None, norm_before_gate=True"
SCAN = "D=None, z=None, dt_bias=None, dt_softplus=False"
TRITON = "mamba_ssm.ops.triton"
CONV = "causal_conv1d.causal_conv1d_interface"
SIGNATURES = {
    f"{TRITON}.layer_norm.layer_norm_ref": f"{SUMMED}, {MASKS}, is_rms_norm=False",
    f"{TRITON}.layer_norm.rms_norm_fn": f"{SUMMED}, residual_in_fp32=False, return_dropout_mask=False",
    f"{TRITON}.layer_norm.rms_norm_ref": f"{SUMMED}, {MASKS}",
    f"{TRITON}.layernorm.layer_norm_fn": f"{NORM}, residual_in_fp32=False, is_rms_norm=False",
    f"{TRITON}.layernorm.layer_norm_ref": f"{NORM}, upcast=False",
    f"{TRITON}.layernorm.rms_norm_fn": (
        "x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False, eps=1e-06"
    ),
    f"{TRITON}.layernorm.rms_norm_ref": f"{NORM}, upcast=False",
    f"{TRITON}.layernorm_gated.rms_norm_ref": f"{GATED}, upcast=True",
    f"{TRITON}.layernorm_gated.rmsnorm_fn": GATED,
    f"{TRITON}.selective_state_update.selective_state_update_ref": f"state, x, dt, A, B, C, {SCAN}",
    f"{TRITON}.ssd_combined.mamba_chunk_scan": f"x, dt, A, B, C, chunk_size, {SCAN}",
    f"{TRITON}.ssd_combined.mamba_split_conv1d_scan_ref": (
        "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, dt_limit=(0.0, inf), activation='silu', "
        "rmsnorm_weight=None, rmsnorm_eps=1e-06, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, "
        "norm_before_gate=True"
    ),
    f"{MAMBA3}.mamba3_mimo_rotary_step.apply_rotary_qk_inference_reference": (
        "q, k, angle_state, angle_proj, dt, bias_q=None, bias_k=None, conjugate=False, rotate_pairwise=True"
    ),
    f"{MAMBA3}.mamba3_siso_step.mamba3_siso_step": (
        "Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D=None, Z=None, Input_States=None"
    ),
    f"{CONV}.causal_conv1d_ref": (
        "x, weight, bias=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None"
    ),
    f"{CONV}.causal_conv1d_update_ref": "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None",
}


@pytest.fixture(autouse=True)
def installed():
    """The official names for one test, and whatever there was before it afterwards."""
    install()
    yield
    uninstall()


def official(module: str, name: str):
    """A name as a script would import it."""
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", NAMES)
def test_names(module):
    for name in NAMES[module].split():
        assert official(module, name) is not None


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path):
    function = official(*path.rsplit(".", 1))
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    assert ", ".join(map(str, parameters)) == SIGNATURES[path]
    assert pickle.loads(pickle.dumps(function)) is function
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'unheard_of'"):
        function(*parameters, unheard_of=1)
    with pytest.raises(TypeError, match=r"too many positional arguments|positional arguments but"):
        function(*parameters, 1)


def test_a_module_has_two_names_and_one_self():
    alias = importlib.import_module("mamba_ssm.modules.mamba2")
    own = importlib.import_module("mambakit.compat.mamba_ssm.modules.mamba2")
    assert alias is own
    assert own.__spec__.name == own.__name__ == "mambakit.compat.mamba_ssm.modules.mamba2"
    assert official("mamba_ssm", "Mamba2") is own.Mamba2
    assert importlib.util.find_spec("mamba_ssm") is not None


def test_installing_twice_is_installing_once():
    assert install() == install() == ("mamba_ssm", "causal_conv1d")
    assert sum(isinstance(finder, CompatFinder) for finder in sys.meta_path) == 1


def test_after_uninstall_the_names_are_gone():
    importlib.import_module("mamba_ssm.ops")
    uninstall()
    with pytest.raises(ModuleNotFoundError, match="No module named 'mamba_ssm'"):
        importlib.import_module("mamba_ssm")
    assert importlib.util.find_spec("causal_conv1d") is None


@pytest.mark.parametrize("name", ["mamba_ssm.ops.triton.unheard_of", "mamba_ssm.unheard_of.at_all"])
def test_other_modules_say_that_they_are_not_covered(name):
    with pytest.raises(ModuleNotFoundError, match=r"not covered by mambakit.compat.*docs/compat.md"):
        importlib.import_module(name)


def test_other_names_are_not_there():
    module = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    with pytest.raises(ImportError, match="cannot import name 'unheard_of'"):
        exec("from mamba_ssm.ops.selective_scan_interface import unheard_of")
    assert not hasattr(module, "unheard_of")


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A package `mamba_ssm` on the path, as if it were installed."""
    uninstall()
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("Mamba = 'the real one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    uninstall()
    sys.modules.pop("mamba_ssm", None)


def test_a_real_package_is_not_hidden(real):
    assert install() == ("causal_conv1d",)
    assert official("mamba_ssm", "Mamba") == "the real one"
    assert official("causal_conv1d", "__version__")


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_package_is_hidden_by_force(real, imported):
    if imported:
        assert official("mamba_ssm", "Mamba") == "the real one"
        assert install() == ("causal_conv1d",)
    assert install(force=True) == ("mamba_ssm", "causal_conv1d")
    assert official("mamba_ssm", "Mamba").__name__ == "Mamba"
    uninstall()
    assert official("mamba_ssm", "Mamba") == "the real one"


def test_a_folder_of_that_name_is_no_package(real):
    (real / "mamba_ssm" / "__init__.py").unlink()
    importlib.invalidate_caches()
    assert install() == ("mamba_ssm", "causal_conv1d")


@pytest.fixture
def run(monkeypatch, capsys):
    """`python -m mambakit.compat` in this process: exit code and what it printed."""

    def call(*arguments, cwd):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "path", [str(cwd), *sys.path])
        monkeypatch.setattr(sys, "argv", sys.argv)
        code = 0
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = stopped.code
        return code, *capsys.readouterr()

    return call


SCRIPT = "import sys, beside\nfrom mamba_ssm import Mamba\nprint(__name__, sys.argv, beside.x, Mamba.__name__)\n"


@pytest.mark.parametrize("as_module", [False, True])
def test_running_a_script(tmp_path, as_module):
    """In a process of its own, from another folder than the script's."""
    folder = tmp_path / "somewhere"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("x = 5\n")
    target = ["-m", "script"] if as_module else [str(folder / "script.py")]
    command = [sys.executable, "-m", "mambakit.compat", *target, "--lr", "3"]
    cwd = folder if as_module else tmp_path
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"__main__ {[str(folder / 'script.py'), '--lr', '3']} 5 Mamba\n"


def test_running_beside_a_real_package(real, run):
    (real / "script.py").write_text("from mamba_ssm import Mamba\nprint(Mamba)\n")
    code, out, err = run(real / "script.py", cwd=real)
    assert (code, out) == (0, "the real one\n")
    assert "using the installed mamba_ssm; --force hides it" in err
    _, out, err = run("--force", real / "script.py", cwd=real)
    assert "mambakit.compat.mamba_ssm" in out
    assert not err


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--force"], ["absent.py"]])
def test_running_nothing(tmp_path, run, arguments):
    code, _, err = run(*arguments, cwd=tmp_path)
    assert code == 2
    assert "usage: python -m mambakit.compat" in err


def test_help(tmp_path, run):
    code, out, _ = run("--help", cwd=tmp_path)
    assert code == 0
    assert "usage:" in out


@pytest.mark.parametrize("script", GALLERY, ids=lambda script: script.name)
def test_gallery(script, tmp_path, run):
    """Each imports official names only, and runs as it stands."""
    assert "mambakit" not in script.read_text("utf-8").split('"""', 2)[2], "the script does not know mambakit"
    code, out, err = run(script, cwd=tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        del sys.modules[name]  # one of them brings its own
    assert code == 0, err
    assert out.strip()


def test_the_table_of_names_is_up_to_date():
    page = (ROOT / "docs" / "compat.md").read_text("utf-8")
    assert page == coverage.rewritten(page), "run python -m mambakit.compat.coverage docs/compat.md"
    assert ", 0 absent." in page


def test_references_share_nothing_with_what_they_check():
    """Nor do they call anything of ours but each other and the checks of arguments."""
    for file in (ROOT / "src" / "mambakit" / "compat" / "references").glob("*.py"):
        ours = [line for line in file.read_text("utf-8").splitlines() if line.startswith("from mambakit")]
        assert all(re.match(r"from mambakit\.compat\.(references|arguments)\b", line) for line in ours), file.name
