"""One thread and deterministic algorithms for every test; golden vectors and the tolerance table."""

import json
import os
import re
import sys
from pathlib import Path

# Before torch is imported, and for the processes that tests start. Tests with more threads share their cores with other
# tests: a thread that waits has to sleep.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # also fills `empty` with NaN, so an unwritten element shows

settings.register_profile("mambakit", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("mambakit")

CASES = json.loads((Path(__file__).parent / "golden" / "manifest.json").read_text("utf-8"))["cases"]

# Tests whose cases compute for more than a second and a half each: `--quick` leaves them out.
SLOW = {
    "::test_compiles_in_one_graph",
    "::test_every_instruction_set",
    "::test_other_instruction_sets",
    "test_backends.py::test_a_toy_backend_is_one_registration",
    "test_class_tokens.py::test_compiled",
    "test_cli_bench.py::test_rows_and_report",
    "test_cli_demo.py::test_a_second_demo_gives_identical_figures",
    "test_cli_serve.py::test_a_conversation_outlives_its_server",
    "test_cli_serve.py::test_a_graceful_end",
    "test_cli_serve.py::test_the_key_may_come_from_the_environment",
    "test_cli_serve.py::test_what_takes_longer_than_the_grace_is_cut",
    "test_serve_proofs.py::",
    "test_serve_ray.py::test_two_replicas",
    "test_compat.py::test_running_a_script",
    "test_compat_errors.py::test_checkpoints_in_other_formats",
    "test_compile.py::test_compile",
    "test_context_parallel.py::",
    "test_docs.py::test_example",
    "test_experiments.py::test_digits_command",
    "test_export.py::test_onnx",
    "test_export.py::test_step_package",
    "test_export.py::test_torch_export",
    "test_failures.py::",
    "test_families.py::TestOneRecord::test_is_timed",
    "test_families.py::test_a_sharded_block_is_the_whole_one",
    "test_kernel_ssd.py::test_opcheck",
    "test_kernels.py::test_a_library_of_other_sources_is_refused",
    "test_kernels.py::test_amx_by_name_where_there_is_none",
    "test_kernels.py::test_missing_kernels_say_why",
    "test_moe.py::test_compile_and_export",
    "test_moe.py::test_operator",
    "test_mutations.py::",
    "test_other_trainers.py::",
    "test_outline.py::test_loading_brings_no_shape_reasoning_along",
    "test_quantization.py::test_loss_on_text",
    "test_rotation.py::test_quaternion_product_is_a_proper_operator",
    "test_serve_description.py::",
    "test_serve_page.py::",
    "test_tensor_parallel.py::",
    "test_threads.py::test_generations_of_one_model",
    "test_sessions.py::test_killed_while_parking",
    "test_trainer_runs.py::",
    "test_training.py::test_narrow_dtypes_learn_like_float32",
    "test_triton_gate.py::test_compiles_as_the_table_says",
    "test_triton_hidden.py::",
    "test_triton_interpreter.py::",
}


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="a cross section: one case of each test and family")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--quick`, the first case of every test, or of each family if its cases name some."""
    if not config.getoption("--quick"):
        return
    chosen: dict[tuple[str, ...], pytest.Item] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if not any(slow in test for slow in SLOW):
            chosen.setdefault((test, *re.findall(r"mamba\d", case)), item)
    quick = set(chosen.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in quick])
    items[:] = [item for item in items if item in quick]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden(*families): run once per golden case of these families")


@pytest.fixture
def without_extension():
    """The kernels as on a processor that has nothing beyond its instruction set: no products of narrow numbers."""
    # Not above: backends are asked in the order in which the package itself imports them.
    from mambakit.kernels.cpu.library import library

    found = library()
    found.use("none")
    yield
    found.use(found.extension)
