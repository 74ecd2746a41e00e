"""The parts of a run: text, tokens, rows, schedules, objective, checkpoints, and one process's loop."""

import math
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mambakit as mk
from mambakit.blocks.param_groups import hand_over, maps_of, param_groups
from mambakit.text.documents import Document, hold_out, read_documents, standard_library
from mambakit.text.tokens import Bytes, TokenizerFile, read_tokens
from mambakit.training.batches import Rows, encode
from mambakit.training.lock import LOCK
from mambakit.training.loop import Trainer
from mambakit.training.objective import Objective, TokenLosses, bits_per_byte
from mambakit.training.processes import Ranks
from mambakit.training.run import read_log, train
from mambakit.training.run_checkpoints import RunCheckpoints, Saved
from mambakit.training.saving import Saving
from mambakit.training.schedules import share_of_peak
from mambakit.training.settings import TrainSettings
from trainer_cases import Silent, losses, make_documents, make_model, make_tokenizer, make_trainer


def test_folders_are_read_without_what_is_no_text(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {"b.txt": b"two", "deep/a.txt": b"one", "x.bin": b"a\0b", "none": b"", ".git/c": b"c"}.items():
        (tmp_path / name).write_bytes(content)
    found = read_documents([tmp_path])
    assert [document.content for document in found.documents] == [b"two", b"one"]
    assert sorted(note.split(":")[0] for note in found.notes) == ["left out 1 binary", "left out 1 empty"]
    assert len(read_documents([tmp_path], binary=True).documents) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("x.bin", b"a\0b", "is binary; --binary"), ("x", b"", "is empty"), (None, None, "there is no file or folder")],
)
def test_a_file_named_has_to_be_text(tmp_path, name, content, message):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents([tmp_path / (name or "absent")])


def test_an_unreadable_file_raises_if_named_and_is_noted_in_a_folder(tmp_path, monkeypatch):
    (tmp_path / "good").write_bytes(b"text")
    (tmp_path / "locked").write_bytes(b"text")
    read = Path.read_bytes

    def refuse(path):
        if path.name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match="locked"):
        read_documents([tmp_path / "locked"])
    found = read_documents([tmp_path])
    assert [document.name for document in found.documents] == [f"{tmp_path.name}/good"]
    assert "Permission denied" in found.notes[0]


def test_an_empty_folder_says_what_it_does_not_hold(tmp_path):
    with pytest.raises(ValueError, match="holds no text"):
        read_documents([tmp_path])
    (tmp_path / "x").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"holds no text; left out 1 binary: .*x"):
        read_documents([tmp_path])


def test_held_out_documents_are_others():
    documents = make_documents(50)
    train_on, held = hold_out(documents, 0.2)
    assert sorted(train_on + held) == sorted(documents)
    assert held
    assert 0.1 < sum(len(d.content) for d in held) / sum(len(d.content) for d in documents) < 0.4
    assert hold_out(documents[::-1], 0.2) == (train_on, held)  # the order in which they are found does not matter


def test_of_few_documents_the_ends_are_held_out():
    for share in (0.0, 1.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="held-out share"):
            hold_out([Document("a", b"text")], share)
    alike = [Document(str(i), bytes([i]) * 30) for i in range(20)]  # each as long as what is wanted in all
    train_on, held = hold_out(alike, 0.05)
    assert (len(train_on), {len(content) for _, content in held}) == (20, {2})
    (train_on,), (held,) = hold_out([Document("a", bytes(range(100)))], 0.1)
    assert train_on.content + held.content == bytes(range(100))
    assert len(held.content) == 10


def test_the_standard_library_is_text():
    names = {document.name for document in standard_library()}
    assert "argparse.py" in names
    assert not any("site-packages" in name or name.startswith(("test/", "encodings/")) for name in names)


def test_bytes_come_back_whole_characters_at_a_time():
    tokens, text = Bytes(), "naïve → ok"
    ids = tokens.encode(text.encode())
    assert tokens.decode([*ids, tokens.end]) == text
    pieces = list(tokens.pieces(iter([*ids, tokens.end])))
    assert "".join(pieces) == text
    assert "ï" in pieces
    assert "".join(tokens.pieces(iter([0xC3]))) == "�"  # cut short


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_the_text(tmp_path, seed, monkeypatch):
    """Also where a tokenizer leaves out the space that a text begins with, and shows bytes one by one."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "▁def", "▁", "▁▁", "a", "bc", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: id for id, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    steps = tokenizers.decoders
    spaces, bytes_, first = steps.Replace("▁", " "), steps.ByteFallback(), steps.Strip(" ", 1, 0)
    made.decoder = steps.Sequence([spaces, bytes_, steps.Fuse(), first])
    made.save(str(tmp_path / "tokenizer.json"))
    tokens, draw, lengths = TokenizerFile(tmp_path / "tokenizer.json"), random.Random(seed), []
    decode = tokens.decode
    monkeypatch.setattr(tokens, "decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    whole, none = [7 + byte for byte in "€😀".encode()], [7 + 0xFF]
    for kinds in ([[one] for one in range(1, 7)], [[1], [3], [6], [4, *whole, 4], [4, *none, 4]], [whole], [none]):
        lengths.clear()
        ids = [id for _ in range(200) for id in draw.choice(kinds)]
        assert "".join(tokens.pieces(iter(ids))) == decode(ids)
        assert max(lengths) < 75 or kinds == [none]
    for end in range(60, 80):
        ids = ([1, 4, *whole[:3], 4] * 20)[:end]
        assert "".join(tokens.pieces(iter(ids))) == decode(ids), "the last character may not be whole"
    assert decode([1, 6, 1]) == "def\n def"


def test_tokenizer_files(tmp_path):
    path = make_tokenizer(tmp_path)
    tokens = TokenizerFile(path)
    ids = tokens.encode("to be or not to be →".encode())
    assert len(ids) < len("to be or not to be →")
    assert tokens.decode([*ids, tokens.end]) == "to be or not to be →"
    assert "".join(tokens.pieces(iter([*ids, tokens.end]))) == "to be or not to be →"
    assert tokens.end == tokens.vocab_size - 1  # has no token of a usual name
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    tokens.save(model_dir)
    again = read_tokens(model_dir)
    assert (again.end, again.encode(b"to be")) == (tokens.end, tokens.encode(b"to be"))
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8 \(byte 0xe9 at 3\)"):
        encode([Document("bad.txt", b"caf\xe9")], tokens)
    assert encode([Document("bad.txt", b"caf\xe9")], Bytes())[0].tolist() == [256, 99, 97, 102, 0xE9]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_rows_do_not_depend_on_who_reads_them(parts):
    settings = TrainSettings(steps=1, batch=4, seq_len=8)
    rows = Rows(encode(make_documents(), Bytes()), 256, settings)
    for step in (0, 3, rows.steps_per_epoch, 2 * rows.steps_per_epoch + 1):
        whole = rows.at(step, slice(0, 4))
        size = 4 // parts
        apart = [rows.at(step, slice(i * size, (i + 1) * size)) for i in range(parts)]
        assert torch.equal(torch.cat([batch.pairs_bs2 for batch in apart]), whole.pairs_bs2)
        assert whole.starts_afresh == (step % rows.steps_per_epoch == 0)


def test_rows_go_on_where_they_stopped_and_name_where_documents_start():
    settings = TrainSettings(steps=1, batch=2, seq_len=8)
    documents = make_documents()
    rows = Rows(encode(documents, Bytes()), 256, settings)
    steps = [rows.at(step, slice(0, 2)) for step in range(rows.steps_per_epoch)]
    ids_bS = torch.cat([batch.pairs_bs2[..., 0] for batch in steps], 1)
    assert torch.equal(ids_bS[:, 1:], torch.cat([batch.pairs_bs2[..., 1] for batch in steps], 1)[:, :-1])
    assert torch.equal(torch.cat([batch.reset_bs for batch in steps], 1), ids_bS == 256)
    whole = [bytes(piece) for piece in bytes_between_ends(ids_bS[0].tolist())]
    assert set(whole[1:-1]) <= {document.content for document in documents}
    assert len(whole) > 3
    carry = Rows(encode(documents, Bytes()), 256, TrainSettings(steps=1, batch=2, seq_len=8, boundaries="carry"))
    assert carry.at(0, slice(0, 2)).reset_bs is None


def bytes_between_ends(ids: list[int]) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for i in ids:
        if i == 256:
            pieces.append([])
        else:
            pieces[-1].append(i)
    return pieces


def test_too_little_text_says_how_much_is_needed():
    with pytest.raises(ValueError, match="has 4 tokens, but 8 rows of 512 need 4104"):
        Rows(encode([Document("a", b"abc")], Bytes()), 256, TrainSettings(steps=1))


def test_schedules():
    cosine = TrainSettings(steps=100, warmup=10, floor=0.1)
    assert share_of_peak(0, cosine) == pytest.approx(0.1)
    assert share_of_peak(9, cosine) == share_of_peak(10, cosine) == 1.0
    assert share_of_peak(55, cosine) == pytest.approx(0.55)
    assert share_of_peak(100, cosine) == pytest.approx(0.1)
    wsd = TrainSettings(steps=100, warmup=10, schedule="wsd", decay=0.2, floor=0.0)
    assert [share_of_peak(step, wsd) for step in (10, 80)] == [1.0, 1.0]
    assert share_of_peak(90, wsd) == pytest.approx(0.5)
    assert share_of_peak(100, wsd) == 0.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 6, "accumulate": 4}, "4 equal parts"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd' is unknown; choose from adamw, muon"),
        ({"lr": 0.0}, "lr = 0.0 has to be positive"),
        ({"floor": 2.0}, "between 0 and 1"),
        ({"autocast": "float16"}, "choose bfloat16"),
    ],
)
def test_settings_that_cannot_be(changed, message):
    with pytest.raises(ValueError, match=message):
        TrainSettings(steps=1, **changed)


def test_segments_change_neither_loss_nor_gradients():
    model = make_model().double()
    rows = Rows(encode(make_documents(), Bytes()), 256, TrainSettings(steps=1, batch=2, seq_len=30))
    batch = rows.at(2, slice(0, 2))
    found = []
    for segment_len in (None, 7):
        model.zero_grad()
        loss, cache = Objective(model, segment_len)(batch.pairs_bs2, reset_bs=batch.reset_bs)
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in model.parameters()], cache))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_bits_per_byte_is_the_sum_over_each_file_alone():
    model, documents = make_model(), encode(make_documents(11), Bytes())
    nats = 0.0
    for ids_s in documents:
        pairs_1s2 = torch.stack([ids_s.long(), torch.cat([ids_s[1:], ids_s[:1]]).long()], -1)[None]
        nats += TokenLosses(model)(pairs_1s2)[0].sum().item()
    total = sum(len(ids_s) - 1 for ids_s in documents)
    assert bits_per_byte(model, documents, total) == pytest.approx(nats / math.log(2) / total, rel=1e-5)


def test_hooks_can_be_left_out_and_gradients_moved_by_hand():
    model = make_model()
    ids = torch.randint(0, 256, (1, 5))
    by_hook = param_groups(model, muon=True)
    model(ids)[0].square().mean().backward()
    expected = [p.grad.clone() for group in by_hook for p in group["params"]]
    model.zero_grad()
    by_hand = param_groups(model, muon=True, hooks=False)
    model(ids)[0].square().mean().backward()
    weight = model.backbone.layers[0].mixer.in_proj.weight
    assert weight.grad is not None
    for weight in model.parameters():
        if leaves := maps_of(weight):
            hand_over(weight.grad, leaves.values())
            weight.grad = None
    for one, other in zip(expected, [p.grad for group in by_hand for p in group["params"]], strict=True):
        torch.testing.assert_close(one, other)


def test_muon_steps_as_torchs_muon_on_the_groups():
    ours = make_trainer(optimizer="muon", clip=0.5)
    model, settings = make_model(), ours.settings
    groups = param_groups(model, weight_decay=settings.weight_decay, muon=True)
    kinds = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
    chosen = {name: [group for group in groups if group["optimizer"] == name] for name in kinds}
    optimizers = [torch.optim.Muon(chosen["muon"]), torch.optim.AdamW(chosen["adamw"], betas=(0.9, 0.95))]
    cache = None
    for step in range(3):
        batch = ours.rows.at(step, slice(0, settings.batch))
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * share_of_peak(step, settings)
        loss, cache = Objective(model)(batch.pairs_bs2, cache, reset_bs=batch.reset_bs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], settings.clip)
        for optimizer in optimizers:
            optimizer.step()
        assert ours.advance().loss == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("changed", [{"accumulate": 2}, {"segment_len": 5}, {"autocast": "bfloat16"}])
def test_how_a_step_is_computed_changes_rounding_only(changed):
    plain, other = make_trainer(), make_trainer(**changed)
    near = 0.05 if "autocast" in changed else 1e-5
    for _ in range(4):
        assert other.advance().loss == pytest.approx(plain.advance().loss, abs=near)


def test_the_state_is_carried_from_step_to_step():
    """The loss of a step is that of its tokens after all that came before in their rows."""
    trainer = make_trainer(lr=1e-12, weight_decay=0.0)
    steps = [trainer.rows.at(step, slice(0, trainer.settings.batch)) for step in range(3)]
    pairs_bs2 = torch.cat([batch.pairs_bs2 for batch in steps], 1)
    reset_bs = torch.cat([batch.reset_bs for batch in steps], 1)
    loss_bs, _ = TokenLosses(trainer.model)(pairs_bs2, reset_bs=reset_bs)
    for loss_bl in loss_bs.detach().split(trainer.settings.seq_len, 1):
        assert trainer.advance().loss == pytest.approx(loss_bl.mean().item(), abs=1e-5)


def test_training_learns():
    trainer = make_trainer(steps=60, optimizer="muon")
    before = trainer.evaluate()
    for _ in range(60):
        trainer.advance()
    assert trainer.evaluate() < 0.75 * before


def poison(trainer: Trainer, steps: dict[int, float]) -> None:
    """Gradients of two weights become this number at these steps."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, steps[trainer.step]) if trainer.step in steps else grad

    mixer = trainer.model.backbone.layers[1].mixer
    for weight in (mixer.in_proj.weight, mixer.dt_bias):
        weight.register_hook(spoil)


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Parameters and what the optimizers keep."""
    kept = {name: pieces.own[0] for name, pieces in trainer.optimizers.shares().items()}
    return {name: tensor.clone() for name, tensor in {**trainer.weights(), **kept}.items()}


def assert_untouched(trainer: Trainer, before: dict[str, torch.Tensor]) -> None:
    after = whole_state(trainer)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    weights = [leaf for weight in trainer.model.parameters() for leaf in (weight, *maps_of(weight).values())]
    assert all(weight.grad is None for weight in weights)


def test_a_loss_that_is_no_number_stops_the_run():
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.backbone.embedding.weight.fill_(math.nan)
    with pytest.raises(
        ValueError, match=r"the loss is nan at step 1 \(no finite gradient of [^)]+\); a lower learning rate"
    ):
        trainer.advance()
    assert trainer.step == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_after_a_loss_that_is_no_number_the_step_can_be_tried_again(optimizer, monkeypatch):
    trainer, expected = make_trainer(optimizer=optimizer, accumulate=2), make_trainer(optimizer=optimizer, accumulate=2)
    trainer.advance()
    expected.advance()
    before, forward = whole_state(trainer), Objective.forward

    def spoiled(self, *args, **options):
        loss, cache = forward(self, *args, **options)
        return loss * math.nan, cache

    with monkeypatch.context() as patched:
        patched.setattr(Objective, "forward", spoiled)
        with pytest.raises(ValueError, match="the loss is nan at step 2"):
            trainer.advance()
    assert_untouched(trainer, before)
    assert trainer.advance() == expected.advance()
    assert_untouched(trainer, whole_state(expected))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_no_numbers_stop_the_run_before_a_step(optimizer, number):
    trainer = make_trainer(optimizer=optimizer)
    poison(trainer, {2: number})
    trainer.advance()
    trainer.advance()
    before = whole_state(trainer)
    with pytest.raises(
        ValueError, match=r"step 3 .*layers\.1\.mixer\.dt_bias.*layers\.1\.mixer\.in_proj\.weight"
    ) as told:
        trainer.advance()
    assert "layers.0" not in str(told.value)
    assert "--skip-bad-steps" in str(told.value)
    assert trainer.step == 2
    assert_untouched(trainer, before)


def test_a_norm_too_large_to_be_a_number_stops_the_run():
    trainer = make_trainer()
    poison(trainer, {0: 1e30})
    before = whole_state(trainer)
    with pytest.raises(ValueError, match="the norm of the gradient is inf at step 1;"):
        trainer.advance()
    assert_untouched(trainer, before)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bad_steps_may_be_skipped(optimizer):
    trainer = make_trainer(optimizer=optimizer, skip_bad_steps=2)
    poison(trainer, {1: math.nan, 3: math.inf, 5: math.nan})
    assert trainer.advance().skipped is None
    before = whole_state(trainer)
    skipped = trainer.advance()
    assert skipped.number == trainer.step == 2
    assert "step 2 " in skipped.skipped
    assert_untouched(trainer, before)
    trainer.advance()
    again = make_trainer(optimizer=optimizer, skip_bad_steps=2)
    poison(again, {1: math.nan, 3: math.inf, 5: math.nan})
    again.restore(trainer.saved())
    for one in (trainer, again):
        assert one.advance().skipped is not None
        assert one.advance().skipped is None
        with pytest.raises(ValueError, match=r"step 6 .*2 steps were skipped before"):
            one.advance()
    assert_untouched(again, whole_state(trainer))


def test_skipped_steps_are_logged_and_counted_across_resumes(tmp_path):
    bad = {4: math.nan, 6: math.inf}

    def run(folder, **changed) -> Silent:
        trainer, watch = make_trainer(steps=8, save_every=5, **changed), Silent()
        poison(trainer, bad)
        train(trainer, folder, Bytes(), watch)
        return watch

    watch = run(tmp_path / "whole", skip_bad_steps=2)
    lines = read_log(tmp_path / "whole" / "log.jsonl")
    assert [line["step"] for line in lines if "skipped" in line] == [5, 7]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 6, 8]
    assert "step 5 " in watch.notes[0]
    with pytest.raises(ValueError, match=r"step 7 .*1 step was skipped before"):
        run(tmp_path / "part", skip_bad_steps=1)
    with pytest.raises(ValueError, match=r"step 7 .*1 step was skipped before"):
        run(tmp_path / "part", skip_bad_steps=1)
    run(tmp_path / "part", skip_bad_steps=2)
    assert read_log(tmp_path / "part" / "log.jsonl") == lines


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_run_goes_on_bit_for_bit(optimizer, tmp_path):
    one = make_trainer(optimizer=optimizer, accumulate=2)
    expected = [one.advance().loss for _ in range(8)]
    other = make_trainer(optimizer=optimizer, accumulate=2)
    for _ in range(4):
        other.advance()
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(other.saved())
    drawn = torch.rand(3)
    third = make_trainer(optimizer=optimizer, accumulate=2)
    torch.manual_seed(5)
    third.restore(checkpoints.newest())
    assert torch.equal(torch.rand(3), drawn)
    assert [third.advance().loss for _ in range(4)] == expected[4:]
    for a, b in zip(one.model.parameters(), third.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_other_settings_is_refused():
    saved = make_trainer().saved()
    with pytest.raises(ValueError, match=r"made with lr = 0.01, not 0.02"):
        make_trainer(lr=0.02).restore(saved)
    make_trainer(save_every=77).restore(saved)


def fill(folder, *steps) -> RunCheckpoints:
    checkpoints = RunCheckpoints(folder)
    for step in steps:
        checkpoints.save(Saved(step, {"step": step, "tensor": torch.arange(1000)}, None))
    return checkpoints


def test_the_last_two_checkpoints_are_kept(tmp_path):
    checkpoints = fill(tmp_path, 1, 2, 3)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.newest().state["step"] == 3
    assert sorted(os.listdir(tmp_path)) == ["step-000000002", "step-000000003"]
    assert RunCheckpoints(tmp_path / "none").newest() is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("name", ["state.pt", "sha256"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(damage, name, tmp_path):
    checkpoints = fill(tmp_path, 1, 2)
    damage(tmp_path / "step-000000002" / name)
    assert checkpoints.newest().step == 1
    assert "step-000000002 is damaged" in checkpoints.notes[0]
    fill(tmp_path, 2)  # written again, it is whole again
    assert checkpoints.newest().step == 2
    for step in (1, 2):
        damage(tmp_path / f"step-{step:09}" / name)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        checkpoints.newest()


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    trainer = make_trainer()
    checkpoints = RunCheckpoints(tmp_path)
    trainer.advance()
    Saving(trainer, checkpoints).save()
    trainer.advance()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"step 2 could not be saved .*No space left.*the last checkpoint is that of step 1"
    ):
        Saving(trainer, checkpoints).save()
    assert os.listdir(tmp_path) == ["step-000000001"]
    assert checkpoints.newest().step == 1


def test_a_run_is_logged_once_however_often_it_is_resumed(tmp_path):
    train(make_trainer(steps=6), tmp_path / "whole", Bytes(), Silent())
    part = make_trainer(steps=6, save_every=2)

    class StopAt5(Silent):
        def step(self, step):
            if step.number == 5:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        train(part, tmp_path / "part", Bytes(), StopAt5())
    assert len(losses(tmp_path / "part")) == 5
    with open(tmp_path / "part" / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    watch = Silent()
    train(make_trainer(steps=6, save_every=2), tmp_path / "part", Bytes(), watch)
    assert watch.notes == ["going on from step 4"]
    assert read_log(tmp_path / "part" / "log.jsonl") == read_log(tmp_path / "whole" / "log.jsonl")
    assert torch.equal(mk.load_model(tmp_path / "part/model").lm_head.weight, part_weight(tmp_path / "whole/model"))


def part_weight(folder):
    return mk.load_model(folder).lm_head.weight


def test_a_damaged_log_is_kept_up_to_the_damage(tmp_path):
    train(make_trainer(steps=6), tmp_path, Bytes(), Silent())
    log = tmp_path / "log.jsonl"
    whole = log.read_bytes().splitlines(keepends=True)
    for damaged in (
        b"\xff\xfe\n",
        b'{"step": 3, "lo\n',
        b"[]\n",
        b'{"stop": 3}\n',
        b'{"step": "3"}\n',
        b"\n",
        b"[" * 9999 + b"\n",
    ):
        log.write_bytes(b"".join([*whole[:2], damaged, *whole[3:]]))
        watch = Silent()
        train(make_trainer(steps=6), tmp_path, Bytes(), watch)
        assert log.read_bytes() == b"".join(whole[:2])
        assert f"{log} is damaged in line 3" in watch.notes[-1]


def test_a_checkpoint_of_another_model_is_refused():
    saved, other = make_trainer().saved(), make_trainer()
    del saved.state["model"]["backbone.norm_f.weight"]
    saved.state["model"]["backbone.embedding.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"another model: backbone\.embedding\.weight, backbone\.norm_f\.weight"):
        other.restore(saved)


def test_the_processes_of_others_are_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]  # public in its docs
    try:
        Ranks().close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_two_runs_in_one_folder(tmp_path):
    class Second(Silent):
        def step(self, step):
            if step.number == 2:
                before = sorted(path.name for path in tmp_path.iterdir())
                with pytest.raises(ValueError, match=rf"{tmp_path} is in use by another run \(process {os.getpid()}\)"):
                    train(make_trainer(steps=6), tmp_path, Bytes(), Silent())
                assert sorted(path.name for path in tmp_path.iterdir()) == before

    train(make_trainer(steps=6), tmp_path, Bytes(), Second())
    assert len(losses(tmp_path)) == 6
    assert not (tmp_path / LOCK).exists()
    (tmp_path / LOCK).write_text("1\n")  # left by a run that was killed
    train(make_trainer(steps=6), tmp_path, Bytes(), Silent())
