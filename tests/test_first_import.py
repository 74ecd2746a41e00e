"""What an import brings along, and what the command line says before any work."""

import subprocess
import sys

import pytest

import mambakit
from mambakit.cli.main import VERBS, main

COMPILERS = ("torch._dynamo", "torch._inductor", "sympy", "torch.fx.experimental.symbolic_shapes")
OPTIONAL = ("rich", "tokenizers", "jinja2", "transformers", "matplotlib", "huggingface_hub", "torch.utils.tensorboard")


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported after `code`."""
    shown = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('\\n' + ' '.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(shown.stdout.splitlines()[-1].split())


def test_the_package_alone_does_not_wait_for_torch():
    found = modules_after("import mambakit\nmambakit.__version__")
    assert "mambakit" in found
    assert "torch" not in found


def test_names_come_with_torch_alone():
    """Not with its compilers, whose import takes longer than torch's own."""
    found = modules_after("import mambakit as mk\nmk.Mamba3")
    assert "torch" in found
    assert not found.intersection((*COMPILERS, *OPTIONAL))


def test_an_operation_imported_by_its_file_has_its_kernels():
    code = "from mambakit.ops.ssd import SSD\nassert 'cpu' in SSD.kernels\nfrom mambakit.ops.backends import BACKENDS"
    assert "mambakit.kernels.cpu.ssd" in modules_after(
        f"{code}\nassert list(BACKENDS) == ['cpu', 'triton', 'triton_fast']"
    )


def test_all_names_are_there():
    assert set(mambakit.__all__) <= set(dir(mambakit))
    assert all(getattr(mambakit, name) is not None for name in mambakit.__all__)
    assert mambakit.ops.ssd.ssd is mambakit.ssd
    with pytest.raises(AttributeError, match="no attribute 'Mamba4'"):
        mambakit.Mamba4  # noqa: B018


HELP = "from mambakit.cli.main import main\ntry:\n    main([{!r}])\nexcept SystemExit as end:\n    assert not end.code"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_without_torch(option):
    assert "torch" not in modules_after(HELP.format(option))


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"mambakit {mambakit.__version__}\n"


def test_help_names_every_verb(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"    {verb.name}" in shown for verb in VERBS)


EXTRAS = ["matplotlib", "tensorboard", "sklearn", "zstandard", "starlette", "uvicorn", "prometheus_client", "gguf"]
EXTRAS += ["onnx", "onnxscript", "llguidance", "transformers"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["serve", "model"],
            "serving needs starlette and uvicorn and prometheus-client: pip install starlette uvicorn",
        ),
        (["bench", "--out", "here"], "a report (--out) needs matplotlib: pip install matplotlib"),
        (
            ["experiment", "digits"],
            "an experiment needs matplotlib and scikit-learn: pip install matplotlib scikit-learn",
        ),
        (["train", "--out", "run", "--tensorboard"], "--tensorboard needs tensorboard: pip install tensorboard"),
        (["generate", "tiny.gguf", "--tokenizer", "bytes"], "reading tiny.gguf needs gguf: pip install gguf"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_missing_extra_is_one_line_before_any_work(arguments, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    for name in EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"mambakit {arguments[0]}: {line}")
    assert shown.count("\n") == 1


def test_verbs_are_imported_and_trained_without_extras(tmp_path):
    """In a process of its own, where nothing has imported them before."""
    (tmp_path / "text").write_text("to be or not to be " * 200)
    tiny = ["--steps=2", "--d-model=16", "--head-dim=8", "--layers=1", "--batch=2", "--seq-len=16", "--held-out=0.2"]
    code = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS!r}, None))\n"
    code += "import importlib\nfrom mambakit.cli.main import VERBS, main\n"
    code += "for verb in VERBS:\n    importlib.import_module(verb.module)\n"
    run = [str(tmp_path / "text"), "--out", str(tmp_path / "run"), *tiny]
    code += f"sys.exit(main({['train', *run]!r}) or main({['generate', str(tmp_path / 'run'), '--prompt', 'to']!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "logs").exists()
