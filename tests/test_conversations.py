"""Records and conversations: what is read, what is refused and where, and which tokens of a chat are learned."""

import csv
import json
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from mambakit.text.chat import Chat, read_chat
from mambakit.text.conversations import Conversation, Example, conversation, examples
from mambakit.text.documents import Document, hold_out_whole, read_documents
from mambakit.text.records import Record
from mambakit.text.tokens import Bytes, TokenizerFile
from mambakit.text.vocabulary import learn, save

ASKED = {"role": "user", "content": "1+1?"}
SAID = {"role": "assistant", "content": "2."}
MORE = [ASKED, SAID, {"role": "user", "content": "and 2+2?"}, {"role": "assistant", "content": "4, of course"}]

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{%- for m in messages %}
    {%- if m.role == "assistant" %}
        {{- "<|im_start|>assistant\n" }}
        {%- generation %}
        {{- m.content + "<|im_end|>" }}
        {%- endgeneration %}
        {{- "\n" }}
    {%- else %}
        {{- "<|im_start|>" + m.role + "\n" + m.content + "<|im_end|>\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}"""
FORGETFUL = """{% for m in messages %}[{{ m.role }}]
{%- if m.role == "assistant" and loop.last %}<think></think>{% endif %}
{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerFile:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = learn(["and of course the answer is 4, 2+2? user assistant"] * 20, 320)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    save(made, path)
    return TokenizerFile(path)


def chat_of(tokens, template: str | None) -> Chat:
    ends = [tokens.end] if template is None else [tokens.end, *tokens.encode(b"<|im_end|>")[:1]]
    return Chat(tokens, template, start=[tokens.end], stop_ids=ends)


def learned(example: Example, tokens) -> list[str]:
    """The texts of the stretches that count; the end of a document is `$`."""
    pieces, before = [], False
    for id, counts in zip(example.ids, example.counts, strict=True):
        if counts and not before:
            pieces.append([])
        if counts:
            pieces[-1].append(id)
        before = counts
    return ["".join("$" if id == tokens.end else tokens.decode([id]) for id in piece) for piece in pieces]


class TestSpans:
    def test_lines_without_a_template(self, tokenizer):
        for tokens in (Bytes(), tokenizer):
            (example,) = examples(Conversation("x", MORE), chat_of(tokens, None))
            assert learned(example, tokens) == ["2.", "4, of course$"]
            text = "user: 1+1?\nassistant: 2.\nuser: and 2+2?\nassistant: 4, of course"
            assert tokens.decode(example.ids) == text
            assert example.ids[0] == example.ids[-1] == tokens.end

    def test_an_answer_is_written_as_a_model_writes_it(self, tokenizer):
        """Not across the border: what a model gets ends in a space, and ` of` would begin before it."""
        spaced = [ASKED, {"role": "assistant", "content": "of course"}]
        (example,) = examples(Conversation("x", spaced), chat_of(tokenizer, None))
        prompt = chat_of(tokenizer, None).render([ASKED]).ids
        assert tokenizer.encode(b"user: 1+1?\nassistant: of course")[: len(prompt) - 1] != prompt[1:]
        assert example.ids[: len(prompt)] == prompt
        assert example.counts == [False] * len(prompt) + [True] * (len(example.ids) - len(prompt))

    @pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
    def test_templates(self, tokenizer, template):
        (example,) = examples(Conversation("x", MORE), chat_of(tokenizer, template))
        assert learned(example, tokenizer) == ["2.<|im_end|>", "4, of course<|im_end|>"]
        prompt = chat_of(tokenizer, template).render(MORE[:3]).ids
        assert example.ids[: len(prompt)] == prompt

    def test_marks_are_those_of_transformers(self, tokenizer):
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.path), chat_template=MARKED)
        system = [{"role": "system", "content": "Be short."}, *MORE]
        found = theirs.apply_chat_template(system, return_dict=True, return_assistant_tokens_mask=True)
        (example,) = examples(Conversation("x", system), chat_of(tokenizer, MARKED))
        mask = [bool(one) for one in found["assistant_masks"]]
        size = len(example.ids)
        assert example.ids == found["input_ids"][:size]
        assert example.counts == mask[:size]
        assert not any(mask[size:])

    def test_a_template_that_writes_earlier_answers_otherwise(self, tokenizer):
        chat = chat_of(tokenizer, FORGETFUL)
        found = examples(Conversation("x", MORE), chat)
        assert [learned(one, tokenizer) for one in found] == [
            ["<think></think>2.<|im_end|>"],
            ["<think></think>4, of course<|im_end|>"],
        ]
        for example, count in zip(found, (1, 3), strict=True):
            prompt = chat.render(MORE[:count]).ids
            assert example.ids[: len(prompt)] == prompt

    def test_a_template_that_cannot_be_cut(self, tokenizer):
        backwards = "{% for m in messages|reverse %}{{ m.content }};{% endfor %}"
        with pytest.raises(
            ValueError, match=r"x: the chat template writes what precedes answer 2 otherwise .*generation"
        ):
            examples(Conversation("x", MORE[:2]), chat_of(tokenizer, backwards))
        strict = "{{ raise_exception('no') }}"
        with pytest.raises(ValueError, match="x: the chat template does not take these messages: no"):
            examples(Conversation("x", MORE[:2]), chat_of(tokenizer, strict))

    def test_only_the_completion_counts(self):
        record = Record("x", {"prompt": MORE[:3], "completion": MORE[3:]})
        (example,) = examples(conversation(record), chat_of(Bytes(), None))
        assert learned(example, Bytes()) == ["4, of course$"]

    def test_without_a_template(self):
        record = Record("x", {"prompt": "1+1=", "completion": "2"})
        (example,) = examples(conversation(record), chat_of(Bytes(), None), template=False)
        assert example.ids == [256, *b"1+1=2", 256]
        assert example.counts == [False] * 5 + [True] * 2


def write(folder, name: str, *lines) -> str:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


GOOD = {"messages": [ASKED, SAID]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"messages": [', "line 3 is not JSON: Expecting value at column 15"),
        ("[1]", "line 3 is a list, expected an object"),
        ({"question": "x"}, "line 3 has the fields question; expected messages, prompt and completion, or text"),
        ({"messages": "hi"}, "line 3: messages is a text, expected a list of messages"),
        ({"messages": []}, "line 3: messages is empty"),
        ({"messages": ["hi"]}, r"line 3: messages\[0\] is a text, expected an object with role and content"),
        (
            {"messages": [ASKED, {"role": "bot", "content": ""}]},
            r"line 3: messages\[1\] has the role 'bot'; expected one",
        ),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] has no role"),
        ({"messages": [ASKED, {"role": "assistant"}]}, r"messages\[1\] has no content"),
        ({"messages": [{"role": "user", "content": 3}, SAID]}, r"messages\[0\] has content that is a number"),
        ({"messages": [ASKED]}, "line 3 has no message of the assistant, which is what is learned"),
        ({"prompt": "x"}, "line 3 has a prompt and no completion"),
        ({"completion": "x"}, "line 3 has a completion and no prompt"),
        ({"prompt": 3, "completion": "x"}, "line 3: prompt is a number, expected a list of messages"),
        ({"text": 3}, "line 3: text is a number, expected a text"),
    ],
)
def test_bad_records_are_named_by_their_line(bad, message, tmp_path):
    path = write(tmp_path, "chats.jsonl", GOOD, "", bad)
    with pytest.raises(ValueError, match=rf"chats\.jsonl, {message}" if message.startswith("line") else message):
        read_documents([path])


def test_files_that_hold_nothing(tmp_path):
    for name in ("x.jsonl", "x.csv"):
        with pytest.raises(ValueError, match=rf"{name} holds no records"):
            read_documents([write(tmp_path, name, "")])
    (tmp_path / "bad.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"text": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2 is not UTF-8: byte 0xe9 at column 14"):
        read_documents([tmp_path / "bad.jsonl"])


def test_texts_and_conversations_are_told_apart(tmp_path):
    path = write(
        tmp_path, "mixed.jsonl", GOOD, {"text": "a document"}, {"text": ""}, {"prompt": "a", "completion": "b"}
    )
    found = read_documents([path])
    assert found.documents == [Document("mixed.jsonl, line 2", b"a document")]
    assert [one.name for one in found.conversations] == ["mixed.jsonl, line 1", "mixed.jsonl, line 4"]
    assert found.notes == ["left out 1 empty: mixed.jsonl, line 3"]
    assert len(read_documents([path], records=False).documents) == 1  # a file like any other


def test_csv(tmp_path):
    path = tmp_path / "x.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "completion"], ["a,\n'b'", "→"], ["", "d"]])
    first, second = read_documents([path]).conversations
    assert [message["content"] for message in first.messages] == ["a,\n'b'", "→"]
    assert (first.name, second.name) == ("x.csv, line 2", "x.csv, line 4")
    with pytest.raises(ValueError, match=r"y\.csv, line 3 has 3 values, and line 1 names 2 fields"):
        read_documents([write(tmp_path, "y.csv", "prompt,completion", "a,b", "a,b,c")])
    with pytest.raises(ValueError, match=r"z\.csv, line 2: unexpected end of data"):
        read_documents([write(tmp_path, "z.csv", "text", '"a')])


def test_tables(tmp_path):
    """As a folder of the hub, as `datasets` saves one, and by themselves."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    rows = [{"messages": [ASKED, SAID], "id": 1}, {"messages": MORE, "id": 2}]
    table = arrow.Table.from_pylist(rows)
    hub, saved = tmp_path / "hub" / "data", tmp_path / "saved"
    hub.mkdir(parents=True)
    (tmp_path / "hub" / "README.md").write_text("about")
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        parquet.write_table(table, hub / f"{name}.parquet")
    for split in ("train", "validation"):
        (saved / split).mkdir(parents=True)
        with ipc.new_stream(str(saved / split / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
        (saved / split / "state.json").write_text("{}")
    with ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    for path in (tmp_path / "hub", hub / "train-00000-of-00001.parquet", saved, tmp_path / "x.arrow"):
        found = read_documents([path])
        assert [one.messages for one in found.conversations] == [MORE[:2], MORE], path
        assert not found.documents
        assert found.conversations[1].name.endswith(", row 2")
    notes = read_documents([tmp_path / "hub"]).notes
    assert notes == [
        "left out 1 beside a dataset: hub/README.md",
        "left out 1 of other splits: hub/data/test-00000-of-00001.parquet",
    ]
    parquet.write_table(arrow.table({"a": [1], "b": [2]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"other\.parquet, row 1 has the fields a, b; expected messages"):
        read_documents([tmp_path / "other.parquet"])
    for name in ("bad.parquet", "bad.arrow"):
        with pytest.raises(ValueError, match=rf"{name} cannot be read"):
            read_documents([write(tmp_path, name, "no table")])


def test_arrow_files_are_not_believed(tmp_path):
    """Offsets that point beyond the texts would be read there."""
    arrow = pytest.importorskip("pyarrow")
    batch = arrow.record_batch({"text": ["ab", "cd"]})
    with arrow.OSFile(str(tmp_path / "x.arrow"), "wb") as file, arrow.ipc.new_stream(file, batch.schema) as stream:
        stream.write(batch)
    content = (tmp_path / "x.arrow").read_bytes()
    offsets = b"\0\0\0\0\2\0\0\0\4\0\0\0"
    assert content.count(offsets) == 1
    for wrong in (b"\0\0\0\0\2\0\0\0\xff\xff\xff\x0f", b"\0\0\0\0\2\0\0\0\1\0\0\0"):
        (tmp_path / "x.arrow").write_bytes(content.replace(offsets, wrong))
        with pytest.raises(ValueError, match=r"x\.arrow cannot be read"):
            read_documents([tmp_path / "x.arrow"])


def test_tools_need_a_template():
    with pytest.raises(ValueError, match="tools are for a chat template"):
        Chat(Bytes()).text(MORE, tools=[{"type": "function"}])


def test_tables_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"reading .*x\.parquet needs pyarrow: pip install pyarrow"):
        read_documents([write(tmp_path, "x.parquet", "")])


def test_conversations_are_held_out_whole():
    many = [Conversation(f"c{i}", MORE) for i in range(40)]
    train, held = hold_out_whole(many, 0.1)
    assert len(held) == 4
    assert sorted(train + held, key=lambda one: int(one.name[1:])) == many
    assert len(hold_out_whole(many[:2], 0.9)[0]) == 1
    with pytest.raises(ValueError, match="there is one conversation"):
        hold_out_whole(many[:1], 0.1)


def test_a_models_folder_says_how_its_chats_are_written(tmp_path, tokenizer):
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    chat = read_chat(tmp_path, TokenizerFile(tmp_path / "tokenizer.json"), 1000)
    (example,) = examples(Conversation("x", MORE), chat)
    assert learned(example, tokenizer) == ["2.<|im_end|>", "4, of course<|im_end|>"]
