"""lm-eval over HTTP, by its own `local-completions`, gives what it gives in process."""

import json

import pytest

import mambakit as mk
from mambakit.text.chat import Chat
from mambakit.text.tokens import TokenizerFile
from serve_cases import make_service, running

pytest.importorskip("lm_eval", reason="an extra: pip install mambakit[eval]")

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.models.openai_completions import LocalCompletionsAPI  # pyright: ignore[reportMissingImports]

from mambakit.compat.lm_eval import MambakitLM

PAIRS = [("What comes after one?", " two"), ("What comes after one?", " three"), ("A", " b"), ("x y", " z" * 20)]
TEXTS = ["One. Two. Three.", "A state is what is left of the past."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes as a file, which lm-eval reads with transformers."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    mk.save_model(make_service().model, folder)
    alphabet = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = alphabet(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([], trainer)
    made.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture(scope="module")
def url(folder):
    service = make_service()
    service.tokens = tokens = TokenizerFile(folder / "tokenizer.json")
    service.chat, service.worker.engine.tokenizer = Chat(tokens, stop_ids=[tokens.end]), tokens
    with running(service) as url:
        yield url


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, place) for place, given in enumerate(arguments)]


def test_equal_to_in_process(folder, url, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    there = LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="tiny", tokenizer=str(folder), tokenizer_backend="huggingface"
    )
    here = MambakitLM(pretrained=str(folder))
    asked = instances("loglikelihood", *PAIRS)
    for got, want in zip(
        there.loglikelihood(asked, disable_tqdm=True), here.loglikelihood(asked, disable_tqdm=True), strict=True
    ):
        assert got[0] == pytest.approx(want[0], abs=1e-4)
        assert got[1] == want[1]
    asked = instances("loglikelihood_rolling", *((text,) for text in TEXTS))
    got = there.loglikelihood_rolling(asked, disable_tqdm=True)
    assert got == pytest.approx(here.loglikelihood_rolling(asked, disable_tqdm=True), abs=1e-4)
    settings = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
    asked = instances("generate_until", *((context, settings) for context, _ in PAIRS[1:]))
    assert there.generate_until(asked, disable_tqdm=True) == here.generate_until(asked, disable_tqdm=True)
