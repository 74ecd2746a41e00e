"""`mambakit doctor`: it passes here, says what runs, and would notice a wrong number."""

import dataclasses
import json

import pytest

from mambakit.cli.main import main
from mambakit.ops.backends import BACKENDS
from mambakit.tools import checks as self_check


@pytest.fixture
def one_dtype(monkeypatch):
    """float32 only: all dtypes are the command's, one is enough to test it."""
    limits = {dtype: limit for dtype, limit in self_check.LIMITS.items() if str(dtype) == "torch.float32"}
    monkeypatch.setattr(self_check, "LIMITS", limits)


def test_everything_passes(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"]
    assert found["devices"][0] == "cpu"
    assert all(check["passed"] for check in found["checks"])
    assert {check["dtype"] for check in found["checks"]} == {"float64", "float32", "bfloat16", "float16"}


def test_text_names_the_kernels_and_a_verdict(one_dtype, capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "CPU kernels" in text
    assert "checks passed" in text


def test_missing_kernels_are_named(one_dtype, monkeypatch, capsys):
    missing = dataclasses.replace(BACKENDS["cpu"], why_missing=lambda: "no compiler was found")
    monkeypatch.setitem(BACKENDS, "cpu", missing)
    assert main(["doctor"]) == 0
    assert "torch's operators run instead: no compiler was found" in capsys.readouterr().out


def test_a_wrong_number_fails(one_dtype, monkeypatch, capsys):
    right = self_check.ssd

    def wrong(*args, **options):
        y, state = right(*args, **options)
        return y * 1.001, state

    monkeypatch.setattr(self_check, "ssd", wrong)
    with pytest.raises(SystemExit) as stopped:
        main(["doctor"])
    assert stopped.value.code == 1
    assert "FAILED cpu float32 torch, ssd, known answer" in capsys.readouterr().out
