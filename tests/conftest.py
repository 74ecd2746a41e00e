"""One thread and deterministic algorithms for every test; golden vectors and the tolerance table."""

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # also fills `empty` with NaN, so an unwritten element shows

settings.register_profile("mambakit", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("mambakit")

CASES = json.loads((Path(__file__).parent / "golden" / "manifest.json").read_text("utf-8"))["cases"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.golden("family", ...)` runs a test once per stored case of these families, as argument `case`.

    `where=` takes a function of a case that says whether it counts.
    """
    marker = metafunc.definition.get_closest_marker("golden")
    if marker is None:
        return
    cases = [c for c in CASES if c["family"] in marker.args]
    if "where" in marker.kwargs:
        cases = [c for c in cases if marker.kwargs["where"](c)]
    assert cases, f"no golden case of {marker.args}"
    metafunc.parametrize("case", cases, ids=[f"{c['family']}-{c['id']}" for c in cases])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden(*families): run once per golden case of these families")
