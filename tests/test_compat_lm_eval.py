"""lm-eval's three kinds of requests against log-likelihoods and texts computed one by one."""

import json
import os
import subprocess
import sys

import pytest
import torch

import mambakit as mk
from mambakit.text.tokens import Bytes

pytest.importorskip("lm_eval", reason="an extra: pip install mambakit[eval]")

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

from mambakit.compat.lm_eval import MambakitLM

QUESTIONS = [
    {"question": "What comes after one?", "answers": [" two", " three hundred", " a"], "gold": 0, "text": "One. " * 9},
    {"question": "Is Grün a colour?", "answers": [" yes", " no"], "gold": 1, "text": "Grün und blau."},
    {"question": "A", "answers": [" b", " bc", " bcd"], "gold": 2, "text": "x"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of bytes whose next token depends on what was before."""
    torch.manual_seed(0)
    block = mk.Mamba2Config(d_model=32, state_rank=8, per_head_dim=16)
    model = mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=257))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("model")
    mk.save_model(model, folder)
    Bytes().save(folder)
    return folder


@pytest.fixture(params=[{}, {"batch_size": 4}, {"batch_size": "auto", "chunk": 5}], ids=["alone", "batch", "pieces"])
def lm(folder, request):
    return MambakitLM(pretrained=str(folder), **request.param)


def direct(folder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One text, whole, in float64."""
    model = mk.load_model(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation]))[0][0, len(context) - 1 : -1]
    told = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
    return float(told.sum()), logits.argmax(-1).tolist() == continuation


def greedy(folder, prompt: list[int], new: int) -> list[int]:
    return mk.generate(mk.load_model(folder), prompt, max_new_tokens=new, temperature=0, stop=[256])[0].tolist()


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def close(got: float, want: float) -> bool:
    return abs(got - want) <= 1e-4 * max(1, abs(want))


class TestRequests:
    def test_loglikelihood(self, lm, folder):
        pairs = [(q["question"], answer) for q in QUESTIONS for answer in q["answers"]]
        pairs += [("", "Grün"), ("A", " b"), ("spaces ", "move"), ("x" * 40, "y" * 30)]
        got = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        for (context, continuation), (score, is_greedy) in zip(pairs, got, strict=True):
            ids = list(context.encode()) or [256]
            want, want_greedy = direct(folder, ids, list(continuation.encode()))
            if context.endswith(" "):
                want, want_greedy = direct(folder, list(b"spaces"), list(b" move"))
            assert close(score, want), (context, continuation)
            assert is_greedy == want_greedy

    def test_greedy_is_told(self, lm, folder):
        likeliest = greedy(folder, list(b"A word"), 3)
        other = [*likeliest[:2], (likeliest[2] + 1) % 256]
        asked = [(None, list(b"A word"), ids) for ids in (likeliest, other, likeliest[:1])]
        assert [is_greedy for _, is_greedy in lm._loglikelihood_tokens(asked, True)] == [True, False, True]

    def test_rolling(self, lm, folder):
        texts = [q["text"] for q in QUESTIONS]
        got = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in texts)), True)
        for text, score in zip(texts, got, strict=True):
            assert close(score, direct(folder, [256], list(text.encode()))[0]), text

    def test_generate_until(self, lm, folder):
        prompts = [q["question"] for q in QUESTIONS] + [""]
        long = [Bytes().decode(greedy(folder, list(text.encode()) or [256], 20)) for text in prompts]
        settings = {"until": [], "max_gen_toks": 20}
        got = lm.generate_until(requests("generate_until", *((text, settings) for text in prompts)), True)
        assert got == long
        # A stop in the middle of each text, and one that is never written.
        stops = [text[5:7] for text in long]
        asked = [(text, {**settings, "until": [stop, "never"]}) for text, stop in zip(prompts, stops, strict=True)]
        got = lm.generate_until(requests("generate_until", *asked), True)
        assert got == [text.split(stop)[0] for text, stop in zip(long, stops, strict=True)]

    def test_sampling_follows_the_settings(self, lm):
        settings = {"do_sample": True, "temperature": 0.7, "top_k": 1, "max_new_tokens": 6, "until": None}
        ask = requests("generate_until", ("A", settings))
        want = lm.generate_until(requests("generate_until", ("A", {"max_gen_toks": 6})), True)
        assert lm.generate_until(ask, True) == want
        torch.manual_seed(1)
        free = [lm.generate_until(requests("generate_until", ("A", {**settings, "top_k": None})), True) for _ in "ab"]
        assert free[0] != free[1]


class TestRefused:
    def test_settings(self, folder):
        lm = MambakitLM(pretrained=str(folder))
        with pytest.raises(ValueError, match="generation settings num_beams are unknown"):
            lm.generate_until(requests("generate_until", ("A", {"num_beams": 3})), True)
        with pytest.raises(ValueError, match="has no tokens"):
            lm.loglikelihood(requests("loglikelihood", ("A", "")), disable_tqdm=True)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"batch_size": "auto:4"}, "batch_size"), ({"batch_size": 0}, "batch_size"), ({"dtype": "int8"}, "dtype")],
    )
    def test_values(self, folder, options, message):
        with pytest.raises(ValueError, match=message):
            MambakitLM(pretrained=str(folder), **options)

    def test_names(self, folder):
        with pytest.raises(TypeError, match="parallelize"):
            MambakitLM.create_from_arg_string(f"pretrained={folder},parallelize=True")

    def test_a_model_without_a_start(self, tmp_path):
        block = mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8)
        mk.save_model(mk.LanguageModel(mk.ModelConfig(block=block, n_layer=1, vocab_size=256)), tmp_path)
        Bytes().save(tmp_path)
        with pytest.raises(ValueError, match="the tokenizer has 257 tokens, but the model knows 256"):
            MambakitLM(pretrained=str(tmp_path))


TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "text",
        "generation_kwargs": {"until": ["never"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_command_line_with_local_tasks(folder, tmp_path):
    lines = tmp_path / "questions.jsonl"
    lines.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lines)}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        # JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": f"mk_{name}", **source, **task}))
    command = [sys.executable, "-m", "mambakit.compat.lm_eval", "--model", "mambakit", "--batch_size", "3"]
    command += ["--model_args", f"pretrained={folder}", "--tasks", ",".join(f"mk_{name}" for name in TASKS)]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

    (results,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    told = [
        [direct(folder, list(q["question"].encode()), list(a.encode()))[0] for a in q["answers"]] for q in QUESTIONS
    ]
    right = [row.index(max(row)) == q["gold"] for row, q in zip(told, QUESTIONS, strict=True)]
    assert scores["mk_choices"]["acc,none"] == pytest.approx(sum(right) / len(right))
    texts = [q["text"].encode() for q in QUESTIONS]
    total = sum(direct(folder, [256], list(text))[0] for text in texts)
    bits = -total / sum(map(len, texts)) / torch.log(torch.tensor(2.0)).item()
    assert scores["mk_perplexity"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)

    def samples(name):
        (file,) = (tmp_path / "out").rglob(f"samples_mk_{name}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]

    for row, want in zip(samples("choices"), told, strict=True):
        assert [float(answer[0][0]) for answer in row] == pytest.approx(want, rel=1e-4)
    for row, question in zip(samples("writing"), QUESTIONS, strict=True):
        assert row[0][0] == Bytes().decode(greedy(folder, list(question["question"].encode()), 8))
