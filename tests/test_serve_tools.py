"""Calls of functions: OpenAI's own client asks for them, and a model that has learned nothing makes them."""

import json

import openai
import pytest

from mambakit.serving.tools import Calls
from mambakit.text.chat import CallForm, Chat, call_form
from mambakit.text.tokens import Bytes
from serve_cases import make_service, running

HERMES = """{%- if tools %}{{- '# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>
{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
PLAIN = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
FIND = {
    "name": "find",
    "description": "Look something up",
    "parameters": {
        "type": "object",
        "properties": {"word": {"$ref": "#/$defs/word"}, "most": {"type": "integer"}},
        "required": ["word", "most"],
        "additionalProperties": False,
        "$defs": {"word": {"type": "string", "maxLength": 6}},
    },
}
STOP = {"name": "stop_it"}
TOOLS = [{"type": "function", "function": one} for one in (FIND, STOP)]
BESIDE = [{"type": "function", **one} for one in (FIND, STOP)]
HI = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "find"}}
ASKED = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 200}


@pytest.fixture(scope="module", params=[HERMES, PLAIN], ids=["hermes", "plain"])
def service(request):
    service = make_service()
    service.chat = Chat(Bytes(), request.param, stop_ids=[256])
    return service


@pytest.fixture(scope="module")
def client(service):
    with running(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def check(call) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    value = json.loads(call.function.arguments)
    assert isinstance(value, dict)
    if call.function.name == "find":
        assert set(value) == {"word", "most"}
        assert type(value["most"]) is int
        assert len(value["word"]) <= 6
    else:
        assert call.function.name == "stop_it"


class TestChat:
    def test_a_named_function(self, client):
        for seed in range(4):
            answer = client.chat.completions.create(**ASKED, tool_choice=NAMED, seed=seed)
            [choice] = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            [call] = choice.message.tool_calls
            assert call.function.name == "find"
            check(call)

    def test_any_of_them(self, client):
        names = set()
        for seed in range(12):
            asked = {**ASKED, "parallel_tool_calls": False, "tool_choice": "required", "seed": seed}
            [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls
            check(call)
            names.add(call.function.name)
        assert names == {"find", "stop_it"}
        calls = client.chat.completions.create(**ASKED, tool_choice="required", seed=3).choices[0].message.tool_calls
        for call in calls:
            check(call)

    def test_a_stream(self, client):
        asked = {**ASKED, "tool_choice": NAMED, "seed": 5}
        [whole] = client.chat.completions.create(**asked).choices[0].message.tool_calls
        chunks = list(client.chat.completions.create(**asked, stream=True))
        pieces = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
        assert pieces[0].id.startswith("call_")
        assert (pieces[0].index, pieces[0].type, pieces[0].function.name) == (0, "function", "find")
        assert "".join(one.function.arguments or "" for one in pieces) == whole.function.arguments
        assert len(pieces) > 5, "arguments come as they are made"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]
        with client.chat.completions.stream(**asked) as stream:  # the client's own way to put it together
            [call] = stream.get_final_completion().choices[0].message.tool_calls
        assert call.function.arguments == whole.function.arguments

    def test_what_came_of_it_goes_back(self, service, client):
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "find", "arguments": '{"word": "a", "most": 1}'},
        }
        talk = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "found"},
        ]
        seen = []
        render = service.chat.render
        service.chat.render = lambda *given: seen.append(render(*given)) or seen[-1]
        try:
            answer = client.chat.completions.create(**{**ASKED, "messages": talk, "max_tokens": 3})
        finally:
            service.chat.render = render
        assert answer.usage.prompt_tokens == len(seen[0].ids)
        assert "found" in seen[0].text
        assert "find" in seen[0].text
        if service.chat.calls.before:
            assert '{"name": "find", "arguments": {"word": "a", "most": 1}}' in seen[0].text

    def test_free_to_choose(self, service, client):
        """Without a need to call anything the answer is what it is without parsing."""
        for choice in ("auto", "none"):
            answer = client.chat.completions.create(**{**ASKED, "max_tokens": 9}, tool_choice=choice, seed=1)
            assert answer.choices[0].finish_reason in ("length", "stop")
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].message.content

    def test_a_call_and_a_form_do_not_go_together(self, client):
        with pytest.raises(openai.BadRequestError, match="cannot be a call"):
            client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
        bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
        with pytest.raises(openai.BadRequestError, match="cannot be compiled"):
            client.chat.completions.create(**{**ASKED, "tools": [bad]}, tool_choice="required")


class TestResponses:
    ASKED = {"model": "tiny", "input": "hi", "tools": BESIDE, "max_output_tokens": 200}  # noqa: RUF012
    NAMED = {"type": "function", "name": "find"}  # noqa: RUF012

    def test_a_call_and_its_result(self, client):
        first = client.responses.create(**self.ASKED, tool_choice=self.NAMED, extra_body={"seed": 2})
        [item] = first.output
        assert (item.type, item.name, first.status) == ("function_call", "find", "completed")
        assert set(json.loads(item.arguments)) == {"word", "most"}
        result = [{"type": "function_call_output", "call_id": item.call_id, "output": "found"}]
        then = client.responses.create(
            model="tiny", input=result, previous_response_id=first.id, tools=BESIDE, max_output_tokens=5
        )
        assert then.usage.input_tokens > first.usage.input_tokens
        given = [{"role": "user", "content": "hi"}, item.model_dump(exclude_none=True), *result]
        whole = client.responses.create(model="tiny", input=given, tools=BESIDE, max_output_tokens=5)
        assert whole.usage.input_tokens > first.usage.input_tokens

    def test_a_stream(self, client):
        asked = {**self.ASKED, "tool_choice": self.NAMED, "extra_body": {"seed": 2}}
        [whole] = client.responses.create(**asked).output
        events = list(client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == whole.arguments
        [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == whole.arguments
        assert events[-1].type == "response.completed"
        [item] = events[-1].response.output
        assert item.arguments == whole.arguments


MARKED, BARE = CallForm("<tool_call>\n", "\n</tool_call>"), CallForm("", "")
CALL = '<tool_call>\n{"name": "find", "arguments": {"a": "}]\\"", "b": [{}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}]\\"", "b": [{}]}'
NO_NAMES = [f'{{"name": "{name}", "arguments": {{}}}}' for name in (r"\x", "a\nb", r"\ud800", r"\u12")]
"""What a model may write all the same."""


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (MARKED, CALL, None, [("find", ARGUMENTS)]),
        (MARKED, f"Well, <b>\n{CALL}\n{CALL}\n", "Well, <b>\n", [("find", ARGUMENTS)] * 2),
        (MARKED, CALL.replace("\n", ""), None, [("find", ARGUMENTS)]),
        (MARKED, "<tool_call> no </tool_call> after", "<tool_call> no </tool_call> after", []),
        (MARKED, "a <tool_", "a <tool_", []),
        (MARKED, "<tool_call>{", "<tool_call>{", []),
        (MARKED, CALL[:51], None, [("find", '{"a": "}]')]),
        (BARE, '{"name": "find", "arguments": {"x": 1}}', None, [("find", '{"x": 1}')]),
        (BARE, '{"name": "find", "parameters": {}}\n', None, [("find", "{}")]),
        (BARE, '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        (BARE, '{"x": 1}', '{"x": 1}', []),
        (BARE, 'so: {"name": "find", "arguments": {}}', 'so: {"name": "find", "arguments": {}}', []),
        (None, CALL, CALL, []),
        *((MARKED, f"<tool_call>\n{text}", f"<tool_call>\n{text}", []) for text in NO_NAMES),
        *((BARE, text, text, []) for text in NO_NAMES),
    ],
)
def test_calls_in_a_text(form, text, content, calls, size):
    found = Calls(form, ["find"])
    deltas = [delta for at in range(0, len(text), size) for delta in found.push(text[at : at + size])] + found.end()
    assert found.message()["content"] == content
    assert [(one.name, one.arguments) for one in found.calls] == calls
    assert "".join(delta.text for delta in deltas if delta.call is None) == (content or "")
    for call in found.calls:
        assert "".join(delta.text for delta in deltas if delta.call is call) == call.arguments


def test_how_templates_write_calls():
    assert call_form(HERMES) == MARKED
    assert call_form(PLAIN) == BARE
    assert call_form(PLAIN + '{# "parameters": #}').arguments == "parameters"
    assert call_form("{% for m in messages %}{{ m.content }}{% endfor %}") is None
    assert Chat(Bytes(), "a", tool_template=PLAIN).text([], tools=TOOLS).startswith("findstop_it")
