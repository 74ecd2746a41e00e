"""The OpenAPI description is true: what it allows is answered, what it does not is refused, nothing fails."""

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_schema_conformance,
    status_code_conformance,
)

from mambakit.serving.app import describe
from serve_cases import make_service, running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    positive_data_acceptance,
]


PATHS = sorted(describe(make_service())["paths"])


@pytest.fixture(scope="module")
def url():
    with running(make_service(max_tokens=4, seconds=2.0)) as url:
        yield url


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_description(url, path, mode):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for method in schema[path]:
        operation = schema[path][method]

        @hypothesis.settings(max_examples=20, suppress_health_check=list(hypothesis.HealthCheck), database=None)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            body = case.body if isinstance(case.body, dict) else {}
            # No schema can say which schemas and expressions can be compiled, and which templates have tools.
            formed = any(body.get(name) for name in ("response_format", "text", "tools", "tool_choice"))
            checks = [one for one in CHECKS if not (formed and one is positive_data_acceptance)]
            case.call_and_validate(checks=checks, timeout=30)

        try:
            run()
        except hypothesis.errors.Unsatisfiable:
            assert mode is GenerationMode.NEGATIVE  # nothing to be wrong in
