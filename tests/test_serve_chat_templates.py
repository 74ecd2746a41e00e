"""Chat templates: what they render, where messages end, and what a hostile one cannot do."""

import json
import time
import tracemalloc

import pytest

from mambakit.text.chat import Chat, read_chat
from mambakit.text.tokens import Bytes, TokenizerFile
from trainer_cases import make_tokenizer

TALK = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi\nyou"}]
MARKED = (
    "{%- for m in messages %}\n  {{- '<|' ~ m['role'] ~ '|>' }}\n  {%- generation %}{{ m.content | trim }}"
    "{% endgeneration %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_without_a_template_messages_are_lines():
    text, ids, ends = Chat(Bytes(), start=[256]).render(TALK)
    assert text == "system: short\nuser: hi\nyou\nassistant: "
    assert ids == [256, *text.encode()]
    assert [bytes(ids[1:end]).decode() for end in ends] == ["system: short\n", "system: short\nuser: hi\nyou\n"]


def test_a_template_is_rendered_as_transformers_does():
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    text = Chat(Bytes(), MARKED).text(TALK)
    compiled = transformers._compile_jinja_template(MARKED)
    assert text == compiled.render(messages=TALK, add_generation_prompt=True)


def test_messages_that_a_template_changes_later_have_no_end():
    only_last = "{% for m in messages %}{{ m.role }}{% if loop.last %}:{{ m.content }}{% endif %};{% endfor %}"
    chat = Chat(Bytes(), only_last)
    assert chat.render(TALK).ends == (len(chat.text(TALK)),)
    alternating = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ messages | length }}"
    assert Chat(Bytes(), alternating).render(TALK).ends == (1,)
    with pytest.raises(ValueError, match="does not take these messages: no"):
        Chat(Bytes(), alternating).render(TALK[:1])


def test_long_conversations_have_ends_first_and_last():
    talk = [{"role": "user", "content": str(i)} for i in range(100)]
    assert len(Chat(Bytes()).render(talk).ends) == 32


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(100000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 2 ** 1000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ range(99999) | join('a' * 90000) }}",
        "{{ ('a' * 90000).join(range(99999)) }}",
        "{{ ('a' * 90000).replace('a', 'b' * 90000) }}",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% for a in range(100000) %}{{ 'a' * 90000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 90000 * 90000 }}",
        "{% set l = ['a' * 90000] * 90000 %}{{ l }}",
        "{% set l = ['a' * 90000] * 90000 %}{{ l | string }}",
        "{% set l = ['a' * 90000] * 90000 %}{{ l | tojson }}",
        "{% set l = ['a' * 90000] * 90000 %}{{ l ~ 'a' }}",
        "{% set l = [1] * 90000 %}{{ [l] * 90000 }}",
        "{{ messages | tojson(indent=90000) }}",
        "{{ ('a\\n' * 90000) | indent(90000) }}",
        "{{ ('a ' * 90000) | wordwrap(1, true, 'b' * 90000) }}",
        "{{ ('http://a.b ' * 90000) | urlize(rel='a' * 90000) }}",
        "{{ ('\\t' * 90000).expandtabs(90000) }}",
        "{{ ('a' * 90000).translate({97: 'b' * 90000}) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ ('{:1000000000}' | attr('format'))(1) }}",
        "{{ ([[1] * 9000] * 9000) | sum(start=[]) }}",
        "{{ lipsum(n=90000) }}",
        "{{ (range(99999) | list * 99) | unique | list }}",
        "{{ 1 / 0 }}",
        "{{ nothing.there }}",
    ],
)
def test_a_hostile_template_ends_early(source):
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="the chat template"):
            Chat(Bytes(), source).text(TALK)
        assert tracemalloc.get_traced_memory()[1] < 2**29
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("messages", [[1], [{}], [{"role": 3}], "x", {"role": "user"}], ids=str)
def test_what_are_no_messages(messages):
    for template in (None, MARKED):
        with pytest.raises(ValueError, match="messages have to be a list of objects, each with a role"):
            Chat(Bytes(), template).render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [1, 2] | sum }}{{ messages | sum('n', 1) }}", "313"),
        ("{{ 'a\\nb' | indent(2) }}", "a\n  b"),
        ("{{ messages[0] | string }}{{ [messages] }}", "{'n': 12, 'role': 'user'}[[{'n': 12, 'role': 'user'}]]"),
        ("{{ messages | tojson(indent=1) }}", '[\n {\n  "n": 12,\n  "role": "user"\n }\n]'),
        ("{{ 'ab' * 2 ~ [1] * 2 }}{{ 'a'.center(3) }}", "abab[1, 1] a "),
    ],
)
def test_what_is_small_is_made(source, text):
    assert Chat(Bytes(), source).text([{"n": 12, "role": "user"}]) == text


def test_what_a_folder_says(tmp_path):
    Bytes().save(tmp_path)
    chat = read_chat(tmp_path, Bytes(), 257)
    assert chat.stop_ids == (256,)
    assert chat.stops
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "{{ bos_token }}x"}], "bos_token": "<s>"})
    )
    assert read_chat(tmp_path, Bytes(), 257).text(TALK) == "<s>x"
    (tmp_path / "chat_template.jinja").write_text("y")
    assert read_chat(tmp_path, Bytes(), 257).text(TALK) == "y"
    for name, text in (("tokenizer_config.json", "[]"), ("tokenizer_config.json", "{"), ("chat_template.jinja", "{%")):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=r"holds no object|is not JSON|cannot be read"):
            read_chat(tmp_path, Bytes(), 257)
        (tmp_path / name).write_text(before)


def test_ends_of_tokens(tmp_path):
    """Of a tokenizer that merges across messages, only ends that are ends of tokens count."""
    tokens = TokenizerFile(make_tokenizer(tmp_path))
    rendered = Chat(tokens, "{% for m in messages %}{{ m.content }}{% endfor %}").render(
        [{"role": "user", "content": text} for text in ("to b", "e or", " not")]
    )
    assert rendered.text == "to be or not"
    for end in rendered.ends:
        assert rendered.text.startswith(tokens.decode(rendered.ids[:end]))
    assert rendered.ends == (3, 4)  # "to be or", "to be or not"; "to b" ends inside a token
