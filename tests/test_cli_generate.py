"""`mambakit generate`: text from checkpoints, in one go and turn by turn."""

import io
import json
import sys

import pytest
import torch

import mambakit as mk
from mambakit.cli.main import main
from mambakit.text.tokens import Bytes, TokenizerFile
from trainer_cases import make_model, make_tokenizer


@pytest.fixture
def model_dir(tmp_path):
    mk.save_model(make_model(), tmp_path / "run" / "model")
    Bytes().save(tmp_path / "run" / "model")
    return tmp_path / "run" / "model"


def generate(*arguments) -> int:
    return main(["generate", *map(str, arguments)])


def continued(model_dir, text: str, count: int, **options) -> str:
    ids = [256, *text.encode()]
    return Bytes().decode(mk.generate(mk.load_model(model_dir), ids, max_new_tokens=count, **options)[0].tolist())


def test_text_follows_a_prompt(model_dir, capsys):
    assert generate(model_dir, "--prompt", "def ", "--max-new-tokens=12", "--seed=3", "--top-p=0.9", "--stats") == 0
    printed, told = capsys.readouterr()
    assert printed == continued(model_dir, "def ", 12, seed=3, top_p=0.9, stop=[256]) + "\n"
    assert "prompt 5 tokens at" in told
    assert "new 12 tokens at" in told
    assert generate(model_dir.parent, "--prompt=x", "--max-new-tokens=1") == 0  # the folder of the run will do


def test_the_prompt_may_come_in_on_standard_input(model_dir, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))  # bytes, whatever they mean
    assert generate(model_dir, "--max-new-tokens=4", "--temperature=0", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] == "caf�"
    assert (result["prompt_tokens"], result["new_tokens"]) == (5, 4)
    assert result["decode_tokens_per_second"] > 0


def test_a_chat_keeps_its_state(model_dir, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n\n"))
    assert generate(model_dir, "--chat", "--max-new-tokens=5", "--temperature=0", "--keep-going") == 0
    model, tokens = mk.load_model(model_dir), Bytes()
    first = mk.stream(model, [256, *b"one\n"], max_new_tokens=5, temperature=0)
    for _ in first:
        pass
    second = mk.generate(model, list(b"two\n"), max_new_tokens=5, temperature=0, cache=first.cache)
    expected = [tokens.decode(first.tokens[0].tolist()), tokens.decode(second[0].tolist())]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


def test_it_ends_at_a_given_text(model_dir, capsys):
    arguments = (model_dir, "--prompt=a", "--json", "--seed=2", "--max-new-tokens=30")
    assert generate(*arguments) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    letter = next(c for c in text if c.isascii() and c.isprintable())
    assert generate(*arguments, "--stop", letter) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text[: text.index(letter) + 1]


def test_it_ends_where_the_document_does(tmp_path, capsys):
    block = mk.Mamba3Config(d_model=16, state_rank=8, per_head_dim=8)
    config = mk.ModelConfig(block=block, n_layer=1, vocab_size=257, rms_norm=False, tie_embeddings=False)
    model = mk.LanguageModel(config)
    with torch.no_grad():  # whatever comes, the end token is the likeliest
        model.backbone.norm_f.weight.zero_()
        model.backbone.norm_f.bias.fill_(1)
        model.lm_head.weight.zero_()
        model.lm_head.weight[256] = 1
    mk.save_model(model, tmp_path / "model")
    Bytes().save(tmp_path / "model")
    arguments = (tmp_path / "model", "--prompt=a", "--json", "--max-new-tokens=3", "--temperature=0")
    for more, count in ([], 1), (["--keep-going"], 3):
        assert generate(*arguments, *more) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["new_tokens"], result["text"]) == (count, "")


def test_a_tokenizer_beside_the_weights_or_given(tmp_path, capsys):
    tokenizer = make_tokenizer(tmp_path)
    tokens = TokenizerFile(tokenizer)
    block = mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8)
    model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=1, vocab_size=tokens.vocab_size))
    mk.save_model(model, tmp_path / "model", format="official")
    arguments = (tmp_path / "model", "--prompt=to be", "--max-new-tokens=6", "--seed=1", "--keep-going")
    assert generate(*arguments) == 2
    assert "no text.json and no tokenizer.json; give --tokenizer" in capsys.readouterr().err
    assert generate(*arguments, "--tokenizer", tokenizer) == 0
    given = capsys.readouterr().out
    (tmp_path / "model" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    assert generate(*arguments) == 0
    assert capsys.readouterr().out == given
    ids = mk.generate(model, [tokens.end, *tokens.encode(b"to be")], max_new_tokens=6, seed=1)
    assert given == tokens.decode(ids[0].tolist()) + "\n"


def test_bad_input_is_one_line_and_exit_code_2(model_dir, tmp_path, capsys):
    silent, huge = tmp_path / "silent.json", tmp_path / "huge.json"
    for path, id in ((silent, 0), (huge, 2**32 - 1)):
        words = {"type": "WordLevel", "vocab": {"a": id}, "unk_token": "b"}
        path.write_text(json.dumps({"version": "1.0", "model": words}))
    for arguments, message in [
        ([tmp_path / "absent", "--prompt=x", "--tokenizer=bytes"], "there is no directory"),
        ([model_dir, "--prompt=x", "--temperature=-1"], "temperature"),
        ([model_dir, "--prompt=x", "--repetition-penalty=1e-40"], "repetition_penalty is 1e-40"),
        ([model_dir, "--prompt=x", "--device=vulkan"], "device is 'vulkan', which torch does not know or have here"),
        ([model_dir, "--prompt=x", "--device=meta"], "the model is on the meta device"),
        ([model_dir, "--prompt=x", "--tokenizer", silent], "silent.json does not take this text"),
        ([model_dir, "--prompt=x", "--tokenizer", huge], "huge.json has ids up to 4,294,967,295"),
        ([model_dir, "--prompt=x", "--chat"], "leave out --prompt"),
        ([model_dir, "--prompt=x", "--tokenizer", tmp_path / "none.json"], "there is no file or folder"),
    ]:
        assert generate(*arguments) == 2, arguments
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1
        assert message in told[0]


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "3", "{", "null", "{}", '{"tokens": "bytes"}', '{"tokens": [], "end": 0}', "[" * 100_000),
        *('{"tokens": "tokenizer.json", "end": "1"}', '{"tokens": "other", "end": 1}', "\xff"),
        *('{"tokens": "bytes", "end": -1}', '{"tokens": "bytes", "end": 1e9}'),
    ],
)
def test_what_the_folder_says_of_its_text_may_be_nonsense(model_dir, capsys, content):
    (model_dir / "text.json").write_bytes(content.encode("latin-1"))
    assert generate(model_dir, "--prompt=a") == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "text.json" in told


def test_a_message_is_one_line_whatever_a_file_says(model_dir, capsys):
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model": {**config["model"], "a\nb\x1b[31m": 1}}))
    assert generate(model_dir, "--prompt=a") == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "a\\nb\\x1b[31m" in told


def test_a_tokenizer_with_ids_beyond_its_size(model_dir, tmp_path, capsys):
    path = make_tokenizer(tmp_path)
    described = json.loads(path.read_text())
    described["added_tokens"] = [
        {"id": 10**6, "content": "far", "special": False, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
    ]
    described["model"]["vocab"]["far"] = 10**6
    path.write_text(json.dumps(described))
    assert generate(model_dir, "--prompt=far", "--tokenizer", path) == 2
    assert "the tokenizer has 1000002 tokens" in capsys.readouterr().err
