"""Models that are trained further: whole or by adapters, on answers alone, in rows that share nothing."""

import json
import os
import shutil
import signal

import pytest
import torch

import mambakit as mk
from compare import check
from mambakit.cli.main import main
from mambakit.parallel.vocabulary import IGNORED
from mambakit.text.chat import Chat
from mambakit.text.conversations import Conversation, Example, examples
from mambakit.text.documents import hold_out_whole, read_documents
from mambakit.text.tokens import Bytes
from mambakit.training.examples import HeldOutAnswers, Packed, fill_rows, fitting, pairs_of
from mambakit.training.loop import Trainer
from mambakit.training.objective import Objective, TokenLosses
from mambakit.training.run_checkpoints import RunCheckpoints
from mambakit.training.settings import TrainSettings
from test_adapters import BLOCKS, HYBRID
from trainer_cases import losses, make_documents, make_model

SIZES = ["--d-model=16", "--layers=1", "--state-rank=8", "--head-dim=8"]
TINY = ["--batch=4", "--seq-len=64", "--warmup=2", "--held-out=0.1", "--no-tensorboard", "--evaluate-every=1000"]
WAYS = {"lora": ["--lora=4"], "full": ["--full"]}
CHAT = Chat(Bytes(), start=[256], stop_ids=[256])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and 200 conversations."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    with open(folder / "text", "wb") as file:
        file.write(b" ".join(content for _, content in make_documents()))
    with open(folder / "chats.jsonl", "w") as file:
        for i in range(200):
            a, b = i % 10, i * 7 % 13
            asked = [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
            again = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
            file.write(json.dumps({"messages": asked + (again if i % 3 == 0 else [])}) + "\n")
    assert main(["train", str(folder / "text"), "--out", str(folder / "base"), "--steps=4", *SIZES, *TINY]) == 0
    return folder


def tune(folder, out, *options) -> int:
    given = [str(folder / "chats.jsonl"), "--init", str(folder / "base"), "--out", str(out)]
    return main(["train", *given, *TINY, *map(str, options)])


def weights(path) -> dict[str, torch.Tensor]:
    return mk.load_model(path).state_dict()


def assert_same_runs(one, other) -> None:
    assert losses(one) == losses(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, weights(other)[name]), name


@pytest.mark.parametrize("way", WAYS)
def test_a_run_extended_from_100_to_200_steps_is_one_of_200(way, folder, tmp_path, capsys):
    options = [*WAYS[way], "--schedule=constant", "--lr=0.01", "--save-every=50"]
    assert tune(folder, tmp_path / "whole", "--steps=200", *options) == 0
    assert tune(folder, tmp_path / "part", "--steps=100", *options) == 0
    capsys.readouterr()
    assert main(["train", "--out", str(tmp_path / "part"), "--resume", "--steps=200"]) == 0
    assert "schedule" not in capsys.readouterr().err
    assert len(losses(tmp_path / "whole")) == 200
    # Adapters of rank 4 on a model of one layer, whose embedding stays as it is, learn a little.
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - (0.1 if way == "lora" else 1.0)
    assert_same_runs(tmp_path / "part", tmp_path / "whole")
    if way == "lora":
        files = [tmp_path / run / "adapter" / "adapter_model.safetensors" for run in ("part", "whole")]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(way, folder, tmp_path, monkeypatch):
    assert tune(folder, tmp_path / "whole", "--steps=8", *WAYS[way]) == 0
    advance = Trainer.advance

    def interrupted(self):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "advance", interrupted)
        assert tune(folder, tmp_path / "part", "--steps=8", *WAYS[way]) == 130
    assert len(losses(tmp_path / "part")) == 5
    assert mk.load_model(tmp_path / "part")
    assert main(["train", "--out", str(tmp_path / "part"), "--resume"]) == 0
    assert_same_runs(tmp_path / "part", tmp_path / "whole")


def test_a_schedule_that_falls_says_what_becomes_of_it(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert tune(folder, out, "--steps=6", "--lr=0.001") == 0
    capsys.readouterr()
    assert main(["train", "--out", str(out), "--resume", "--steps=8"]) == 0
    told = capsys.readouterr().err
    assert "the cosine schedule is now that of 8 steps: the learning rate goes from 0.000232 to 0.000325" in told
    assert json.loads((out / "run.json").read_text())["steps"] == 8
    assert main(["train", "--out", str(out), "--resume", "--steps=7"]) == 2
    assert "the run is at step 8 already; --steps 7 is behind it" in capsys.readouterr().err
    assert json.loads((out / "run.json").read_text())["steps"] == 8


def loss_of_answer(model, messages, place) -> tuple[float, int]:
    """Minus the log-probability of one answer and that it ends there, token by token."""
    prompt = "".join(f"{m['role']}: {m['content']}\n" for m in messages[:place]) + "assistant: "
    answer = [*messages[place]["content"].encode(), *([256] if place == len(messages) - 1 else [])]
    ids, nats = [256, *prompt.encode()], 0.0
    for id in answer:
        nats -= model(torch.tensor([ids]))[0][0, -1].log_softmax(0)[id].item()
        ids.append(id)
    return nats, len(answer)


def test_the_loss_is_that_of_the_answers(folder, tmp_path, capsys):
    assert tune(folder, tmp_path / "out", "--steps=1", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    _, held_out = hold_out_whole(read_documents([folder / "chats.jsonl"]).conversations, 0.1)
    model, nats, count = mk.load_model(result["model"]), 0.0, 0
    with torch.no_grad():
        for _, messages, *_ in held_out:
            for place in range(1, len(messages), 2):
                more, tokens = loss_of_answer(model, messages, place)
                nats, count = nats + more, count + tokens
    assert result["held_out_answer_tokens"] == count
    assert result["loss_per_answer_token"] == pytest.approx(nats / count, rel=1e-5)
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert log[-1] == {"step": 1, "loss_per_answer_token": result["loss_per_answer_token"]}


def test_adapters_are_kept_apart_and_merged(folder, tmp_path, capsys):
    options = ["--steps=6", "--lora=2", "--lora-alpha=16", "--lr=0.01"]
    assert tune(folder, tmp_path / "merged", *options, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert tune(folder, tmp_path / "apart", *options, "--no-merge") == 0
    assert not (tmp_path / "apart" / "model").exists()
    config = json.loads((tmp_path / "apart" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 16, "LORA")
    ids = torch.tensor([list(b"user: 3+4?\nassistant: ")])
    base = mk.load_model(folder / "base")
    adapted = mk.load_lora(mk.load_model(folder / "base"), made["adapter"])
    with torch.no_grad():
        want = adapted(ids)[0]
        assert (want - base(ids)[0]).abs().max() > 1e-3
        for place in (made["model"], tmp_path / "merged", tmp_path / "apart", tmp_path / "apart" / "adapter"):
            check(1e-5, {"logits": mk.load_model(place)(ids)[0]}, {"logits": want})
    assert mk.load_tokenizer(tmp_path / "apart").encode("x") == [120]
    state = RunCheckpoints(tmp_path / "apart" / "checkpoints").newest().state
    assert all("lora_" in name for name in state["model"])
    for verb in (
        ["generate", "{}", "--prompt=user: 1", "--max-new-tokens=3"],
        ["convert", "{}", "{}-hf", "--format=official"],
    ):
        capsys.readouterr()
        assert main([part.format(tmp_path / "apart") for part in verb]) == 0
    check(
        1e-5, {"logits": mk.load_model(f"{tmp_path / 'apart'}-hf", a_activation="heavy_tail")(ids)[0]}, {"logits": want}
    )


def test_the_base_has_to_stay_as_it_was(folder, tmp_path, capsys):
    shutil.copytree(folder / "base", tmp_path / "base")
    given = [str(folder / "chats.jsonl"), "--init", str(tmp_path / "base"), "--out", str(tmp_path / "out"), *TINY]
    assert main(["train", *given, "--steps=2", "--lora=2"]) == 0
    model = mk.load_model(tmp_path / "base")
    with torch.no_grad():
        model.backbone.norm_f.weight[0] += 1
    mk.save_model(model, tmp_path / "base" / "model")
    assert main(["train", "--out", str(tmp_path / "out"), "--resume", "--steps=4"]) == 2
    assert "have changed since the run began" in capsys.readouterr().err


def test_what_contradicts_is_one_line(folder, tmp_path, capsys):
    (tmp_path / "broken.jsonl").write_text('{"messages": []}\n')
    for options, message in [
        (["--d-model=32"], f"--d-model 32 contradicts {folder / 'base'}, which has 16; leave it out"),
        (["--family=mamba2"], "--family mamba2 contradicts"),
        (["--layers=2"], "--layers 2 contradicts"),
        (["--experts=4"], "--experts 4 contradicts"),
        (["--lora=2", "--full"], "choose one"),
        (["--lora=0"], "rank = 0 has to be a positive integer"),
        (["--lora=2", "--optimizer=muon"], "adapters are trained by adamw"),
        (["--lora-alpha=2"], "are for --lora"),
        (["--lora=2", "--lora-targets=fc9"], "no projections called fc9"),
        (["--boundaries=carry"], "nothing is carried from one example to the next"),
        (["--seq-len=20"], "examples are longer than a row of 20 tokens, up to "),
    ]:
        assert tune(folder, tmp_path / "out", "--steps=2", *options) == 2, options
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1, told
        assert message in told[0]
        assert not (tmp_path / "out").exists()
    for given, message in [
        (["--lora=2"], "--lora says how to fine-tune, and --init MODEL says what"),
        (["--init", tmp_path / "absent"], "there is no directory"),
        (["--init", folder / "base", tmp_path / "broken.jsonl"], "broken.jsonl, line 1: messages is empty"),
    ]:
        assert main(["train", "--out", str(tmp_path / "out"), "--steps=2", *map(str, given)]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert tune(folder, tmp_path / "out", "--steps=1", "--d-model=16", "--family=mamba3", "--layers=1") == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["state_rank"] == 8


def test_text_may_be_learned_from_a_model_too(folder, tmp_path, capsys):
    given = [str(folder / "text"), "--init", str(folder / "base"), "--out", str(tmp_path / "out")]
    assert main(["train", *given, "--steps=2", *TINY, "--json", "--lora=2", "--autocast=bfloat16"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["bits_per_byte"] < 9


def test_a_tokenizer_is_learned_and_used(folder, tmp_path, capsys):
    out = tmp_path / "tok.json"
    given = ["tokenizer", str(folder / "text"), str(folder / "chats.jsonl"), "--out", str(out), "--vocab-size=300"]
    assert main([*given, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["vocab_size"] == 300
    assert made["bytes_per_token"] > 1.5
    tokenizer = mk.load_tokenizer(out)
    text = "scan → gate\n\0"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end == 0
    assert main(given) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["tokenizer", str(folder / "text"), "--out", str(tmp_path / "x"), "--vocab-size=9"]) == 2
    assert "257 are needed" in capsys.readouterr().err
    run = ["train", str(folder / "chats.jsonl"), "--out", str(tmp_path / "run"), "--tokenizer", str(out), "--steps=2"]
    assert main([*run, *SIZES, *TINY]) == 0
    assert mk.load_model(tmp_path / "run").config.vocab_size == 300
    assert mk.load_tokenizer(tmp_path / "run").encode("scan") == tokenizer.encode("scan")
    again = ["--init", str(tmp_path / "run"), "--out", str(tmp_path / "again"), "--steps=2", "--lora=2", "--resume"]
    assert main(["train", str(folder / "chats.jsonl"), *again[:-1], *TINY]) == 0
    assert mk.load_tokenizer(tmp_path / "again").encode("scan") == tokenizer.encode("scan")


TALKS = [
    [("user", "1+1?"), ("assistant", "2.")],
    [("user", "again"), ("assistant", "2."), ("user", "sure?"), ("assistant", "Yes, I am.")],
    [("user", "x"), ("assistant", "a rather long answer that is longer than all the others")],
    [("user", "?"), ("assistant", "!")],
]


def make_examples() -> list[Example]:
    said = [[{"role": role, "content": content} for role, content in talk] for talk in TALKS]
    return [one for i, talk in enumerate(said) for one in examples(Conversation(f"c{i}", talk), CHAT)]


@pytest.mark.parametrize("name", [*BLOCKS, "hybrid"])
@pytest.mark.parametrize("segment_len", [None, 13])
def test_packed_losses_and_gradients_are_those_of_examples_alone(name, segment_len):
    torch.manual_seed(0)
    made = {"layers": HYBRID} if name == "hybrid" else {"block": BLOCKS[name], "n_layer": 2}
    model = mk.LanguageModel(mk.ModelConfig(**made, vocab_size=257), dtype=torch.float64)
    pairs = [pairs_of(example) for example in make_examples()]
    nats, count = torch.zeros((), dtype=torch.float64), 0
    for pairs_s2 in pairs:
        nats = nats + TokenLosses(model)(pairs_s2[None].long())[0].sum()
        count += int((pairs_s2[:, 1] != IGNORED).sum())
    want = nats / count
    grads = torch.autograd.grad(want, list(model.parameters()))
    rows = Packed(pairs, TrainSettings(steps=1, batch=2, seq_len=100))
    assert len(rows.rows) == 2  # four examples
    batch = rows.at(0, slice(0, 2))
    loss, _ = Objective(model, segment_len)(batch.pairs_bs2, reset_bs=batch.reset_bs, scale=batch.scale)
    assert loss.item() == pytest.approx(want.item(), abs=1e-12)
    found = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    check(1e-10, dict(zip(names, found, strict=True)), dict(zip(names, grads, strict=True)))


@pytest.mark.parametrize("changed", [{"accumulate": 2}, {"packing": False}, {"segment_len": 9}])
def test_how_examples_are_laid_out_changes_rounding_only(changed):
    """Parts of a step have different numbers of tokens that count, and so have rows."""
    packing = changed.pop("packing", True)
    pairs = [pairs_of(example) for example in make_examples()]

    def trained(packing, **options) -> list[float]:
        settings = TrainSettings(steps=9, batch=4 if not packing else 2, seq_len=100, lr=0.01, warmup=1, **options)
        rows = Packed(pairs, settings, packing=packing)
        trainer = Trainer(make_model(torch.float64), settings, rows, HeldOutAnswers(pairs))
        return [trainer.advance().loss for _ in range(3)]

    assert trained(packing, **changed) == pytest.approx(trained(True), abs=1e-9)


def test_every_example_comes_once_in_an_epoch():
    pairs = [torch.full((length, 2), i) for i, length in enumerate([5, 9, 3, 7, 2, 8, 10, 1])]
    settings = TrainSettings(steps=1, batch=3, seq_len=10)
    rows = Packed(pairs, settings)
    assert sorted(i for row in rows.rows for i in row) == list(range(8))
    assert len(rows.rows) == 5  # 45 tokens in rows of 10
    seen: list[int] = []
    for step in range(5):  # 15 rows: three epochs
        batch = rows.at(step, slice(0, 3))
        ids_bs = batch.pairs_bs2[..., 0]
        seen += ids_bs[batch.reset_bs].tolist()
        assert torch.equal(rows.at(step, slice(1, 3)).pairs_bs2, batch.pairs_bs2[1:])
    assert sorted(seen) == sorted(list(range(8)) * 3)
    again = Packed(pairs, settings)
    assert torch.equal(again.at(4, slice(0, 3)).pairs_bs2, rows.at(4, slice(0, 3)).pairs_bs2)


def test_rows_are_filled_well():
    assert fill_rows([6, 4, 5, 5, 10, 3], 10) == [[4], [0, 1], [2, 3], [5]]
    lengths = torch.randint(1, 100, (500,)).tolist()
    rows = fill_rows(lengths, 128)
    assert all(sum(lengths[i] for i in row) <= 128 for row in rows)
    assert len(rows) <= 1.02 * sum(lengths) / 128 + 1


def test_examples_that_are_too_long():
    given = make_examples()
    sizes = [len(example.ids) - 1 for example in given]
    with pytest.raises(
        ValueError, match=rf"1 example is longer than a row of 70 tokens, up to {max(sizes)} \(c2\); raise"
    ):
        fitting(given, 70, "refuse")
    pairs, notes = fitting(given, 70, "skip")
    assert len(pairs) == 3
    assert notes == ["1 left out: longer than 70 tokens: c2"]
    pairs, notes = fitting(given, 70, "cut")
    assert [len(pairs_s2) for pairs_s2 in pairs] == [min(size, 70) for size in sizes]
    assert notes == ["1 cut to 70 tokens: c2"]
    assert len(fitting(given, 20, "cut")[0]) == 2  # of the others no answer is left
