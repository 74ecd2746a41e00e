"""`mambakit serve`: what clients of OpenAI's interface ask for, and what they are told when it cannot be done."""

import json
import re
import socket
import threading
import time

import httpx
import openai
import pytest
import torch

import mambakit as mk
from mambakit.serving.answers import Text
from mambakit.serving.store import StoreOnDisk
from mambakit.text.tokens import Bytes
from serve_cases import make_service, running

HI = [{"role": "user", "content": "hi"}]
PROMPT = [256, *b"user: hi\nassistant: "]


@pytest.fixture(scope="module")
def service():
    return make_service()


@pytest.fixture(scope="module")
def url(service):
    with running(service) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def continued(service, ids, count, **options) -> list[int]:
    stop = options.pop("stop", [256])
    return mk.generate(service.model, ids, max_new_tokens=count, stop=stop, **options)[0].tolist()


class TestChat:
    def test_an_answer(self, service, client):
        answer = client.chat.completions.create(model="tiny", messages=HI, max_tokens=9, seed=3, top_p=0.9)
        [choice] = answer.choices
        expected = continued(service, PROMPT, 9, seed=3, top_p=0.9)
        assert choice.message.content == Bytes().decode(expected)
        assert choice.finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 9)
        assert answer.usage.prompt_tokens_details.cached_tokens >= 0

    def test_a_stream_is_the_answer_in_pieces(self, client):
        asked = {"model": "tiny", "messages": HI, "max_completion_tokens": 12, "seed": 4}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage.completion_tokens == 12
        pieces = [chunk.choices[0] for chunk in chunks[:-1]]
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
        assert pieces[0].delta.role == "assistant"
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert len(pieces) > 4

    def test_log_probabilities(self, service, client):
        asked = {
            "model": "tiny",
            "messages": HI,
            "max_tokens": 5,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 3,
        }
        whole = client.chat.completions.create(**asked).choices[0].logprobs.content
        ids = continued(service, PROMPT, 5, temperature=0)
        assert [entry.bytes for entry in whole] == [[id] for id in ids]
        with torch.no_grad():
            logits_sw = service.model(torch.tensor([PROMPT + ids]))[0][0, len(PROMPT) - 1 : -1].log_softmax(-1)
        for entry, id, logits_w in zip(whole, ids, logits_sw, strict=True):
            assert entry.logprob == pytest.approx(float(logits_w[id]), abs=1e-4)
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(logits_w.topk(3)[0].tolist(), abs=1e-4)
            assert entry.top_logprobs[0].bytes == entry.bytes  # greedy
        streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        pieces = [choice.logprobs.content for choice in streamed if choice.logprobs]
        assert [entry for piece in pieces for entry in piece] == whole
        assert all(choice.logprobs for choice in streamed if choice.delta.content)
        assert (streamed[-1].finish_reason, streamed[-1].logprobs) == ("length", None)

    def test_several_answers(self, service, client):
        asked = {"model": "tiny", "messages": HI, "max_tokens": 6, "seed": 5, "n": 3}
        answer = client.chat.completions.create(**asked)
        rows = mk.generate(service.model, [PROMPT] * 3, max_new_tokens=6, seed=5, stop=[256], pad_id=256)
        assert [one.message.content for one in answer.choices] == [Bytes().decode(row) for row in rows.tolist()]
        assert answer.usage.prompt_tokens == len(PROMPT)
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == [one.message.content for one in answer.choices]

    def test_it_ends_before_a_stop(self, client):
        asked = {"model": "tiny", "messages": HI, "max_tokens": 20, "seed": 6}
        text = client.chat.completions.create(**asked).choices[0].message.content
        stop = text[7:9]
        cut = client.chat.completions.create(**asked, stop=[stop, "never there"])
        assert cut.choices[0].message.content == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"
        streamed = client.chat.completions.create(**asked, stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text[: text.index(stop)]

    def test_content_in_parts(self, client):
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        answers = [
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}], seed=1, max_tokens=5
            )
            for content in ("hi", parts)
        ]
        assert answers[0].choices[0].message == answers[1].choices[0].message


SHAPE = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "count"],
    "additionalProperties": False,
}


class TestForms:
    """Text that has to have a form, from a model that has learned nothing."""

    def check(self, text: str) -> None:
        value = json.loads(text)
        assert set(value) == {"ok", "count"}
        assert type(value["ok"]) is bool
        assert 0 <= value["count"] <= 99

    def test_a_schema(self, client):
        form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE, "strict": True}}
        asked = {"model": "tiny", "messages": HI, "response_format": form, "max_tokens": 200}
        answer = client.chat.completions.create(**asked, n=4)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            self.check(choice.message.content)
        streamed = client.chat.completions.create(**asked, stream=True)
        self.check("".join(chunk.choices[0].delta.content or "" for chunk in streamed))

    def test_a_schema_of_a_response(self, client):
        form = {"format": {"type": "json_schema", "name": "shape", "schema": SHAPE}}
        self.check(client.responses.create(model="tiny", input="hi", text=form, max_output_tokens=200).output_text)

    def test_an_expression(self, client):
        form = {"type": "regex", "regex": "[0-9]{3}-[a-f]{2}"}
        answer = client.completions.create(
            model="tiny", prompt="a", max_tokens=20, extra_body={"response_format": form}
        )
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer.choices[0].text)


class TestCompletions:
    def test_text_and_ids(self, service, client):
        answer = client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=6, temperature=0)
        assert [one.text for one in answer.choices] == [
            Bytes().decode(continued(service, list(text), 6, temperature=0)) for text in (b"ab", b"c")
        ]
        ids = client.completions.create(model="tiny", prompt=[list(b"ab"), list(b"c")], max_tokens=6, temperature=0)
        assert [one.text for one in ids.choices] == [one.text for one in answer.choices]
        new = sum(len(continued(service, list(text), 6, temperature=0)) for text in (b"ab", b"c"))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, new)

    def test_echo_with_log_probabilities(self, service, client):
        """As lm-eval asks for them: of the prompt's tokens, each with the likeliest."""
        answer = client.completions.create(model="tiny", prompt="scan", max_tokens=1, echo=True, logprobs=1, seed=0)
        [choice] = answer.choices
        found = choice.logprobs
        with torch.no_grad():
            logits_sw = service.model(torch.tensor([list(b"scan")]))[0][0].log_softmax(-1)
        expected = [float(logits_sw[place, id]) for place, id in enumerate(b"can")]
        assert found.tokens[:4] == list("scan")
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:4] == pytest.approx(expected, abs=1e-4)
        best = [max(top.values()) for top in found.top_logprobs[1:4]]
        assert best == pytest.approx(logits_sw[:3].max(-1)[0].tolist(), abs=1e-4)
        assert found.text_offset == [0, 1, 2, 3, 4]
        assert choice.text.startswith("scan")
        streamed = client.completions.create(
            model="tiny", prompt="scan", max_tokens=1, echo=True, logprobs=1, seed=0, stream=True
        )
        pieces = [chunk.choices[0] for chunk in streamed]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [token for piece in pieces for token in piece.logprobs.tokens] == found.tokens

    def test_a_prompt_scored_without_new_tokens(self, client):
        answer = client.completions.create(model="tiny", prompt="scan", max_tokens=0, echo=True, logprobs=0)
        assert answer.choices[0].text == "scan"
        assert len(answer.choices[0].logprobs.token_logprobs) == 4


class TestResponses:
    def test_one_goes_on_from_another(self, client):
        first = client.responses.create(model="tiny", input="hi", max_output_tokens=5, temperature=0)
        assert first.status in ("completed", "incomplete")
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = client.responses.create(
            model="tiny", input="and", previous_response_id=first.id, max_output_tokens=5, temperature=0
        )
        talk = [*HI, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and"}]
        whole = client.chat.completions.create(model="tiny", messages=talk, max_tokens=5, temperature=0)
        if "�" not in first.output_text:
            assert second.output_text == whole.choices[0].message.content
        assert second.usage.input_tokens > first.usage.input_tokens + 5
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.create(model="tiny", input="x", previous_response_id=first.id)

    def test_a_stream(self, client):
        asked = {"model": "tiny", "input": HI, "instructions": "short", "max_output_tokens": 6, "temperature": 0}
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
        assert events[-1].response.output_text == whole.output_text
        assert client.responses.retrieve(events[-1].response.id).id == events[-1].response.id

    def test_what_is_not_stored_is_not_there(self, client):
        answer = client.responses.create(model="tiny", input="hi", max_output_tokens=2, store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


class States:
    """What a folder of sessions does, in memory that outlives a server."""

    def __init__(self):
        self.kept = {}

    def park(self, key, state):
        self.kept[key] = state

    def resume(self, key):
        if key not in self.kept:
            raise ValueError("there is no session")
        return self.kept[key]

    def delete(self, key):
        self.kept.pop(key, None)


@pytest.fixture(params=["memory", "sessions"])
def states(request, tmp_path):
    if request.param == "memory":
        return States()
    sessions = pytest.importorskip("mambakit.inference.sessions")
    return sessions.Sessions(tmp_path / "states", make_service().model)


def asked(url: str, **fields) -> dict:
    answer = httpx.post(f"{url}/v1/responses", json={"max_output_tokens": 8, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def spoken(response: dict) -> str:
    return response["output"][0]["content"][0]["text"]


class TestStored:
    """Responses in a folder."""

    def test_a_conversation_goes_on_after_a_restart(self, tmp_path, states):
        with running(make_service(StoreOnDisk(tmp_path, states))) as url:
            first = asked(url, input="hi")
            here = asked(url, input="and", previous_response_id=first["id"])
        with running(make_service(StoreOnDisk(tmp_path, states))) as url:
            assert httpx.get(f"{url}/v1/responses/{first['id']}").json() == first
            there = asked(url, input="and", previous_response_id=first["id"])
            assert spoken(there) == spoken(here)
            assert there["usage"]["input_tokens"] == here["usage"]["input_tokens"]
            known = len(StoreOnDisk(tmp_path, states).get(first["id"]).ids)
            assert there["usage"]["input_tokens_details"]["cached_tokens"] == known
            branches = [asked(url, input=text, previous_response_id=first["id"]) for text in ("a", "b")]
            assert all(one["usage"]["input_tokens_details"]["cached_tokens"] >= known for one in branches)
            httpx.delete(f"{url}/v1/responses/{first['id']}")
            assert httpx.get(f"{url}/v1/responses/{first['id']}").status_code == 404
        assert not [path for path in (tmp_path / "responses").iterdir() if path.suffix != ".json"]

    def test_an_end_that_says_nothing_is_no_part_of_the_conversation(self, tmp_path):
        """The token that ends a document has no text, so the next message does not stand behind it."""
        states, ended = States(), None
        service = make_service(StoreOnDisk(tmp_path, states))
        with running(service) as url:
            for seed in range(200):
                ended = asked(url, input="hi", temperature=1, seed=seed, max_output_tokens=24)
                if ended["status"] == "completed":
                    break
            assert ended["status"] == "completed"
            record = service.store.get(ended["id"])
            assert record.ids == [256, *record.text.encode()] or "�" in record.text
            assert 256 not in record.ids[1:]
            assert list(states.kept[ended["id"]].ids) == record.ids
            more = asked(url, input="and", previous_response_id=ended["id"])
            assert more["usage"]["input_tokens_details"]["cached_tokens"] == len(record.ids)

    def test_it_is_on_disk_before_its_last_event(self, tmp_path):
        service = make_service(StoreOnDisk(tmp_path, States()))
        with running(service) as url:
            fields = {"input": "hi", "stream": True, "max_output_tokens": 3}
            with httpx.stream("POST", f"{url}/v1/responses", json=fields) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if event["type"] in ("response.completed", "response.incomplete"):
                            assert service.store.get(event["response"]["id"]).answer == event["response"]
                            return
        pytest.fail("no last event")

    def test_a_damaged_response_is_not_there(self, tmp_path):
        with running(make_service(StoreOnDisk(tmp_path, States()))) as url:
            first = asked(url, input="hi")
            for damaged in (b"", b"{", b"[]", b'{"x": 1}', b"[" * 100_000):
                (tmp_path / "responses" / f"{first['id']}.json").write_bytes(damaged)
                assert httpx.get(f"{url}/v1/responses/{first['id']}").status_code == 404

    def test_states_that_are_gone_are_read_again(self, tmp_path):
        states = States()
        with running(make_service(StoreOnDisk(tmp_path, states))) as url:
            first = asked(url, input="hi")
            here = asked(url, input="and", previous_response_id=first["id"])
        states.kept.clear()
        with running(make_service(StoreOnDisk(tmp_path, states))) as url:
            there = asked(url, input="and", previous_response_id=first["id"])
            assert spoken(there) == spoken(here)
            assert there["usage"]["input_tokens_details"]["cached_tokens"] == 0


def test_embeddings(service, client):
    text = "state " * 200  # more than one chunk
    found = client.embeddings.create(model="tiny", input=["scan", text])
    for entry, one in zip(found.data, ("scan", text), strict=True):
        with torch.no_grad():
            x_1sd, _ = service.model.backbone(service.model.embed(torch.tensor([list(one.encode())])))
        assert entry.embedding == pytest.approx(x_1sd[0].mean(0).tolist(), abs=1e-5)
    assert found.usage.prompt_tokens == 4 + len(text)
    plain = client.embeddings.create(model="tiny", input="scan", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(found.data[0].embedding, abs=1e-6)


def test_models_health_and_metrics(url, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mambakit"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{url}/metrics").text
    assert 'mambakit_http_requests_total{path="/health",status="200"}' in text
    assert "mambakit_reused_tokens_total" in text


FUNCTION = {"type": "function", "function": {"name": "find"}}
WRONG = [
    ("", b"{", 400, "not JSON"),
    ("", b"[]", 400, "JSON object"),
    ("", b'{"messages": NaN}', 400, "not JSON"),
    ("", b'{"messages": "\xff"}', 400, "not UTF-8"),
    ("", b"[" * 100_000, 400, "nested too deeply"),
    ("", b'{"messages": [], "seed": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    ("", {}, 400, "messages is missing"),
    ("", {"messages": []}, 400, "at least 1"),
    ("", {"messages": "hi"}, 400, "expected array"),
    ("", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    ("", {"messages": [{"role": "user", "content": 1}]}, 400, "messages[0].content"),
    ("", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
    ("", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "[0].type is"),
    ("", {"messages": [*HI, {"role": "user"}]}, 400, "messages[1].content is missing"),
    ("", {"messages": [{"role": "system", "content": None}, *HI]}, 400, "messages[0].content is missing"),
    ("", {"messages": HI, "model": "other"}, 404, "no model 'other'"),
    ("", {"messages": HI, "max_tokens": -1}, 400, "max_tokens is -1, expected at least 1"),
    ("", {"messages": HI, "max_tokens": 1.5}, 400, "expected integer"),
    ("", {"messages": HI, "max_tokens": True}, 400, "expected integer"),
    ("", {"messages": HI, "temperature": -0.1}, 400, "at least 0"),
    ("", {"messages": HI, "temperature": 1e999}, 400, "not JSON"),
    ("", {"messages": HI, "top_p": 0}, 400, "above 0"),
    ("", {"messages": HI, "repetition_penalty": 1e-40}, 400, "at least 0.01"),
    ("", {"messages": HI, "n": 0}, 400, "at least 1"),
    ("", {"messages": HI, "stop": [""]}, 400, "stop[0] is empty"),
    ("", {"messages": HI, "stop": {"a": 1}}, 400, "stop"),
    ("", {"messages": HI, "colour": 1}, 400, "colour is not known here"),
    ("", {"messages": HI, "\ud800": 1}, 400, "surrogate"),
    ("", {"messages": HI, "frequency_penalty": 3}, 400, "frequency_penalty is 3, expected at most 2"),
    ("", {"messages": HI, "logit_bias": {"x": 1}}, 400, "a key of logit_bias is 'x'"),
    ("", {"messages": HI, "logit_bias": {"5": 101}}, 400, "logit_bias.5 is 101, expected at most 100"),
    ("", {"messages": HI, "logit_bias": {"99999": 1}}, 400, "logit_bias has 99999, expected ids from 0 to"),
    ("", {"messages": HI, "reasoning_effort": "low"}, 400, "reasoning_effort is not supported by this build"),
    ("", {"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format"),
    (
        "",
        {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        400,
        "schema is missing",
    ),
    ("", {"messages": HI, "response_format": {"type": "regex", "regex": "("}}, 400, "cannot be compiled"),
    (
        "",
        {"messages": HI, "stream": True, "response_format": {"type": "regex", "regex": "("}},
        400,
        "cannot be compiled",
    ),
    ("", {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools[0].function is missing"),
    ("", {"messages": HI, "tools": [FUNCTION]}, 400, "this model's chat template has no tools; leave them out"),
    ("", {"messages": HI, "tools": [FUNCTION] * 2}, 400, "two functions of one name"),
    ("", {"messages": HI, "tool_choice": "required"}, 400, "there are no tools"),
    (
        "",
        {"messages": HI, "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        400,
        "names 'other', which is not among the tools find",
    ),
    ("", {"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
    ("completions", {"prompt": "a", "response_format": {"type": "grammar", "grammar": "start: x"}}, 400, "cannot be"),
    ("", {"messages": HI, "seed": 2**70}, 400, "at most"),
    ("completions", {"prompt": ""}, 400, "prompt is empty"),
    ("completions", {"prompt": []}, 400, "at least 1"),
    ("completions", {"prompt": [[]]}, 400, "at least 1"),
    ("completions", {"prompt": [257]}, 400, "at most 256"),
    ("completions", {"prompt": [-1]}, 400, "at least 0"),
    ("completions", {"prompt": [1, "a"]}, 400, "prompt"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "at most 20"),
    ("completions", {"prompt": "a", "best_of": 2}, 400, "not supported by this build"),
    ("responses", {"input": []}, 400, "at least 1"),
    ("responses", {"input": "a", "previous_response_id": "../../etc/passwd"}, 404, "there is no response"),
    ("responses", {"input": "a", "previous_response_id": "resp_" + "0" * 32}, 404, "there is no response"),
    ("embeddings", {"input": ""}, 400, "input is empty"),
    ("embeddings", {"input": "a", "dimensions": 3}, 400, "not supported by this build"),
    ("embeddings", {"input": "a", "dimensions": 0}, 400, "not supported by this build"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_requests(url, path, body, status, message):
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = httpx.post(f"{url}/v1/{path or 'chat/completions'}", content=content, timeout=20)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_wrong_paths_and_methods(url):
    for method, path, status in [("GET", "/nothing", 404), ("PUT", "/health", 405), ("GET", "/v1/completions", 405)]:
        answer = httpx.request(method, url + path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert httpx.get(f"{url}/v1/models/other").status_code == 404
    assert httpx.get(f"{url}/../../etc/passwd").status_code == 404


def test_large_bodies():
    with running(make_service(max_body=1000)) as url:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]})
        answer = httpx.post(f"{url}/v1/chat/completions", content=body)
        assert answer.status_code == 413
        assert "1,000 bytes" in answer.json()["error"]["message"]

        def pieces():
            for _ in range(30):
                yield b" " * 100

        assert httpx.post(f"{url}/v1/chat/completions", content=pieces()).status_code == 413
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_key():
    with running(make_service(), keys=("one", "two")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(url).status_code == 200  # the page asks for it
        for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Bearer é"}):
            raw = {name: value.encode() for name, value in headers.items()}
            for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/responses/x"):
                answer = httpx.get(url + path, headers=raw)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0)
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1
        wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="three", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_pages_of_other_sites_are_refused(url):
    """What a browser sends for a page from elsewhere, and for a name that was made to lead here."""
    assert httpx.get(f"{url}/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403
    assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(f"{url}/v1/models", headers={"Origin": url}).status_code == 200


def test_no_room(monkeypatch):
    """More than may wait get 429 and are told when to come back, unless there will never be room for so many."""
    service = make_service(max_waiting=2)
    with running(service) as url:
        asked = {"prompt": "a", "max_tokens": 1, "n": 3}
        answer = httpx.post(f"{url}/v1/completions", json=asked)
        assert answer.status_code == 400
        assert "3 answers are asked for at once, at most 2" in answer.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={**asked, "n": 2}).status_code == 200
        monkeypatch.setattr(type(service.worker), "waiting", 1)
        answer = httpx.post(f"{url}/v1/completions", json={**asked, "n": 2})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1


def test_an_answer_ends_when_its_time_is_over():
    with running(make_service(seconds=0.5)) as url:
        answer = httpx.post(
            f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 10**9, "ignore_eos": True}, timeout=30
        )
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(stream):
    service = make_service()
    with running(service) as url:
        asked = {"prompt": "a", "max_tokens": 10**9, "ignore_eos": True, "stream": stream}
        with connected(url) as sock:
            sock.sendall(raw_post(asked))
            wait_until(lambda: service.worker.active == 1)
            if stream:
                assert sock.recv(100)
        wait_until(lambda: service.worker.active == 0 and not service.generations)


def test_connections_opened_and_dropped(url):
    for place in range(300):
        with connected(url) as sock:
            if place % 3:
                sock.sendall(raw_post({"prompt": "a"})[:place])
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_slow_client_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("mambakit.serving.exchange.BODY_SECONDS", 0.3)
    with running(make_service()) as url, connected(url) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


def connected(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def raw_post(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc"])
@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["first", "later"])
def test_a_connection_that_asks_nothing_is_closed(monkeypatch, before, sent):
    monkeypatch.setattr("mambakit.serving.server.HEAD_SECONDS", 0.5)
    with running(make_service()) as url, connected(url) as sock:
        if before:
            sock.sendall(before)
            assert sock.recv(1000)
        sock.sendall(sent or b"G")
        while sock.recv(1000):
            pass


def test_a_client_that_does_not_read_is_left(monkeypatch):
    monkeypatch.setattr("mambakit.serving.service.READING_SECONDS", 0.5)
    service = make_service(seconds=0.5)
    with running(service) as url:
        asked = {"prompt": "a" * 50_000, "echo": True, "stream": True, "max_tokens": 10**9, "n": 16, "logprobs": 20}
        with connected(url) as sock:
            sock.sendall(raw_post(asked))
            wait_until(lambda: service.generations)
            wait_until(lambda: not service.generations and service.worker.active == 0)
        assert httpx.get(f"{url}/health").status_code == 200


def test_large_requests_do_not_stop_the_others():
    """A body of megabytes is read beside the event loop."""
    with running(make_service(seconds=2.0)) as url:
        answers = []
        body = json.dumps({"prompt": [1] * 1_000_000, "max_tokens": 1})
        post = lambda: answers.append(httpx.post(f"{url}/v1/completions", content=body, timeout=60))  # noqa: E731
        thread = threading.Thread(target=post)
        thread.start()
        longest = 0.0
        while thread.is_alive():
            began = time.monotonic()
            httpx.get(f"{url}/health", timeout=20)
            longest = max(longest, time.monotonic() - began)
        assert answers[0].status_code == 503  # its time is over before the prompt is read
        assert answers[0].headers["retry-after"]
        assert longest < 3


def test_beginnings_of_conversations_are_known(client):
    """The end of every message is known from the first request on."""

    def cached(user: str) -> int:
        messages = [{"role": "system", "content": "a long story " * 20}, {"role": "user", "content": user}]
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
        return answer.usage.prompt_tokens_details.cached_tokens

    cached("one")
    assert cached("another") == 1 + len("system: " + "a long story " * 20 + "\n")


def test_many_at_once(service, client):
    """Each of eight streams is what it would be alone."""
    found: dict[int, str] = {}

    def ask(seed: int) -> None:
        asked = client.chat.completions.create(model="tiny", messages=HI, max_tokens=15, seed=seed, stream=True)
        found[seed] = "".join(chunk.choices[0].delta.content or "" for chunk in asked)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {seed: Bytes().decode(continued(service, PROMPT, 15, seed=seed)) for seed in range(8)}


class TestText:
    def test_nothing_is_shown_that_may_become_a_stop(self):
        text = Text(Bytes(), ["<end>", "\n\n"])
        assert [text.push(id) for id in b"a<en\n"] == ["a", "", "", "", "<en"]
        assert [text.push(id) for id in b"x\n\ny"] == ["\nx", "", "", ""]
        assert text.stopped
        assert text.end() == ""

    def test_the_rest_comes_at_the_end(self):
        text = Text(Bytes(), ["<end>"])
        assert "".join(text.push(id) for id in "é<e".encode()) == "é"
        assert text.end() == "<e"
        cut = Text(Bytes(), [])
        assert cut.push("é".encode()[0]) == ""
        assert cut.end() == "�"


def wait_until(claim, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < until
        time.sleep(0.02)
