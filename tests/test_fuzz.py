"""A short run of `fuzz_calls.py`; `make fuzz` is a long one."""

from fuzz_calls import main


def test_calls_end_well(capsys):
    assert main(calls=300, seed=0) == 0, capsys.readouterr().out
