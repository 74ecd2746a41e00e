"""Text in Python: tokenizers by file, folder and hub name, text from a prompt, and byte models in transformers."""

import json
import sys
import types

import pytest
import torch
from transformers import AutoTokenizer, pipeline

import mambakit as mk
from mambakit.text.tokens import Bytes, TokenizerFile, copy_description
from trainer_cases import make_model, make_tokenizer

TEXT = "naïve → ok\n\t \0 \x85 日本 <|end"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """In transformers' format, with tokens that are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    torch.manual_seed(0)
    block = mk.Mamba2Config(d_model=32, state_rank=16, per_head_dim=16)
    mk.save_model(mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257)), folder, "transformers")
    Bytes().save(folder)
    return folder


def test_bytes_in_transformers(byte_model):
    theirs, ours = AutoTokenizer.from_pretrained(byte_model), mk.load_tokenizer(byte_model)
    assert ours.encode(TEXT) == list(TEXT.encode())
    assert theirs(TEXT).input_ids == theirs.encode(TEXT) == ours.encode(TEXT)
    assert theirs.decode(ours.encode(TEXT)) == ours.decode(ours.encode(TEXT)) == TEXT
    assert theirs.convert_tokens_to_ids([theirs.eos_token]) == [ours.end] == [256]
    assert theirs.decode(range(32, 127)) == ours.decode(range(32, 127))


@pytest.mark.filterwarnings("ignore")
def test_pipeline(byte_model):
    options = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}
    (theirs,) = pipeline("text-generation", model=str(byte_model), device="cpu")("to be ", **options)
    model, tokenizer = mk.load_model(byte_model), mk.load_tokenizer(byte_model)
    ours = mk.generate_text(model, tokenizer, "to be ", max_new_tokens=24, temperature=0)
    assert theirs["generated_text"] == ours
    assert "".join(mk.stream_text(model, tokenizer, "to be ", max_new_tokens=24, temperature=0)) == ours
    ids = mk.generate(model, tokenizer.encode("to be "), max_new_tokens=24, temperature=0)[0]
    assert tokenizer.decode(ids) == ours


def test_older_byte_models_get_the_files_when_converted(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "text.json").write_text('{"tokens": "bytes", "end": 256}')
    (tmp_path / "new").mkdir()
    copy_description(tmp_path / "old", tmp_path / "new")
    assert AutoTokenizer.from_pretrained(tmp_path / "new").encode("ab") == [97, 98]


def test_tokenizers_by_file_folder_and_hub_name(tmp_path, monkeypatch):
    path = make_tokenizer(tmp_path)
    ids = TokenizerFile(path).encode(b"to be")
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    TokenizerFile(path).save(model)
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(model)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    for given in (path, str(path), model, tmp_path / "run", "someone/model"):
        assert mk.load_tokenizer(given).encode("to be") == ids
    assert asked == [("someone/model", ["*.json", "*.jinja"])]
    assert mk.load_tokenizer("bytes").encode("ab") == [97, 98]


def test_what_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "bad.json").write_text("{}")
    for given, message in [
        (tmp_path / "absent", "there is no file or folder"),
        (tmp_path, "does not say how its text is written"),
        (tmp_path / "bad.json", "is not a file of the tokenizers package"),
        ("someone/model", "pip install huggingface_hub"),
    ]:
        with pytest.raises(ValueError, match=message):
            mk.load_tokenizer(given)


def test_the_hub_out_of_reach(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise ConnectionError("no network\nand more")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(ValueError, match=r"no file or folder a/b, and the hub did not give it: no network$"):
        mk.load_tokenizer("a/b")


def test_chat_templates(tmp_path):
    Bytes().save(tmp_path)
    plain = mk.load_tokenizer(tmp_path)
    asked = [{"role": "user", "content": "hi"}]
    assert plain.apply_chat_template(asked) == [256, *b"user: hi\nassistant: "]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    ours, theirs = mk.load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for more in (True, False):
        found = theirs.apply_chat_template(asked, add_generation_prompt=more, return_dict=False)
        assert ours.apply_chat_template(asked, add_generation_prompt=more) == found
    assert ours.apply_chat_template(asked) == list(b"<user>hi<me>")


def always(model: mk.LanguageModel, tokens: list[int]) -> mk.LanguageModel:
    """A model that says these tokens in a circle, whatever comes."""
    step, at = model.logits, iter(range(10**6))

    def logits(x):
        found = torch.zeros_like(step(x))
        found[..., tokens[next(at) % len(tokens)]] = 1
        return found

    model.logits = logits
    return model


def test_text_ends_where_it_should():
    tokenizer = mk.load_tokenizer("bytes")

    def said(text: bytes, prompt="x", **options) -> str:
        return mk.generate_text(always(make_model(), list(text)), tokenizer, prompt, temperature=0, **options)

    assert said(b"abc", max_new_tokens=7) == "abcabca"
    assert len(said(b"abc")) == 256
    assert said(b"abc", stop="bc") == "abc"
    assert said(b"abc", stop=["xy", "ca"]) == "abca"
    assert said(b"abc", "", max_new_tokens=2) == "ab"
    model = always(make_model(), [*b"ab", 256])
    assert mk.generate_text(model, tokenizer, "x", temperature=0) == "ab"
    asked = [{"role": "user", "content": "hi"}]
    assert mk.generate_text(always(make_model(), [*b"ab", 256]), tokenizer, asked, temperature=0) == "ab"
    assert said(b"yes\nuser: no", asked) == "yes"


def test_a_tokenizer_that_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="the tokenizer has 266 tokens, but the model knows 257"):
        mk.generate_text(make_model(), mk.load_tokenizer(make_tokenizer(tmp_path)), "x")
    with pytest.raises(ValueError, match="load_tokenizer gives one"):
        mk.generate_text(make_model(), Bytes(), "x")
    with pytest.raises(ValueError, match="encode takes a str, got a bytes"):
        mk.load_tokenizer("bytes").encode(b"x")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "model is a NoneType, expected a LanguageModel"),
        ({"prompt": None}, "messages have to be a list of objects"),
        ({"prompt": "\ud800"}, "text holds half of a surrogate pair"),
        ({"stop": 0.5}, "stop is a float, expected an id, a text"),
        ({"stop": "\ud800"}, "stop holds half of a surrogate pair"),
        ({"max_new_tokens": "3"}, "max_new_tokens is '3', expected a whole number"),
    ],
)
def test_text_of_what_is_none(changed, message):
    given = {"model": make_model(), "tokenizer": mk.load_tokenizer("bytes"), "prompt": "x", "max_new_tokens": 2}
    with pytest.raises(ValueError, match=message):
        mk.generate_text(**given | changed)


@pytest.mark.parametrize(
    "ids", [None, "x", [0.5], [-1], [2**40], torch.zeros(2, 2), torch.zeros(2, device="meta")], ids=str
)
def test_ids_that_are_none(ids):
    with pytest.raises(ValueError, match=r"^ids (is|holds) "):
        mk.load_tokenizer("bytes").decode(ids)
