"""Tasks against answers found by other means, small trainings, and the commands from end to end."""

import json
import random
import re
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from mambakit.cli.main import main
from mambakit.tools.experiments import digits, expressions, fitting, interrupted, permutations, report, state_tracking
from mambakit.tools.experiments.fitting import Fit
from mambakit.tools.experiments.interrupted import Interrupted
from mambakit.tools.experiments.recipe import Lengths, Recipe
from mambakit.tools.experiments.tasks import IGNORE, RECALL_WORDS, TASKS
from mambakit.tools.experiments.variants import VARIANTS

LENGTHS = [*range(3, 14), 40, 101]
TINY = ["--steps", "2", "--seeds", "0", "--sequences", "4"]


def rows_of(task: str, length: int, count: int = 8):
    batch = TASKS[task].generate(count, length, random.Random(length))
    assert batch.ids_bs.shape == batch.targets_bs.shape == (count, length + 1)
    assert batch.ids_bs.max() < TASKS[task].vocab_size
    assert batch.targets_bs.max() < TASKS[task].classes
    assert (batch.targets_bs[:, 0] == IGNORE).all()
    assert len(set(batch.ids_bs[:, 0].tolist())) == 1
    return zip(batch.ids_bs[:, 1:].tolist(), batch.targets_bs[:, 1:].tolist(), strict=True)


@pytest.mark.parametrize("length", LENGTHS)
def test_parity(length):
    for ids, targets in rows_of("parity", length):
        ones = 0
        for token, target in zip(ids, targets, strict=True):
            ones += {1: 0, 2: 1}[token]
            assert target == ones % 2


@pytest.mark.parametrize("length", LENGTHS)
def test_arithmetic_is_what_python_says(length):
    for ids, targets in rows_of("arithmetic", length):
        text = "".join(expressions.TOKENS[token] for token in ids)
        for end, target in enumerate(targets, 1):
            assert target == (eval(text[:end]) % 5 if text[end - 1].isdigit() else IGNORE), text


@pytest.mark.parametrize("length", LENGTHS)
def test_bracketed_arithmetic_is_what_python_says(length):
    for ids, targets in rows_of("brackets", length):
        text = "".join(expressions.TOKENS[token] for token in ids)
        open_at = []
        for at, (token, target) in enumerate(zip(text, targets, strict=True)):
            if token == "(":
                open_at.append(at)
            wanted = eval(text[open_at.pop() : at + 1]) % 5 if token == ")" else IGNORE
            assert target == wanted, text
        assert not open_at
        assert targets[-1] == eval(text) % 5


def test_short_expressions():
    """Those that end in no bracket have a value as well."""
    for length in (1, 2):
        made = expressions.bracketed(length, random.Random(0))
        assert made.values[-1] == eval(made.tokens) % 5
    with pytest.raises(ValueError, match="no token"):
        expressions.bracketed(0, random.Random(0))


def test_group_has_the_even_permutations():
    found = permutations.elements()
    assert len(found) == len(set(found)) == TASKS["a5"].classes == 60
    for element in found:
        assert sum(a > b for i, a in enumerate(element) for b in element[i:]) % 2 == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_words_in_the_group(length):
    found = permutations.elements()
    for ids, targets in rows_of("a5", length):
        where = [0, 1, 2, 3, 4]
        for token, target in zip(ids, targets, strict=True):
            for item in range(5):
                where[item] = permutations.GENERATORS[token - 1][where[item]]
            assert found[target] == tuple(where)


@pytest.mark.parametrize("length", [3, 12, 48, 96])
def test_recall(length):
    for ids, targets in rows_of("recall", length):
        told, asked = ids[: length // 3 * 2], ids[length // 3 * 2 :]
        meaning = dict(zip(told[::2], told[1::2], strict=True))
        assert len(meaning) == length // 3
        assert sorted(asked) == sorted(meaning)
        assert targets[: len(told)] == [IGNORE] * len(told)
        assert [meaning[key] - 1 - RECALL_WORDS for key in asked] == targets[len(told) :]


def test_recall_has_so_many_words():
    with pytest.raises(ValueError, match="33 pairs, expected 1 to 32"):
        TASKS["recall"].generate(1, 99, random.Random(0))


@pytest.mark.parametrize("name", TASKS)
def test_generators_repeat_themselves(name):
    one, two = (TASKS[name].generate(4, 12, random.Random(5)) for _ in range(2))
    assert torch.equal(one.ids_bs, two.ids_bs)
    assert torch.equal(one.targets_bs, two.targets_bs)


def test_scores():
    task = TASKS["arithmetic"]
    assert task.scaled(1.0) == 100
    assert task.scaled(0.2) == 0
    assert task.scaled(0.6) == pytest.approx(50)
    targets = torch.tensor([[IGNORE, 1, 2], [IGNORE, 3, 0]])
    assert task.scored(targets).tolist() == [[False, False, True]] * 2
    assert TASKS["recall"].scored(targets).tolist() == [[False, True, True]] * 2


def test_curriculum():
    lengths = Lengths(TASKS["parity"], Recipe(steps=1000))
    longest = [lengths.longest(step) for step in range(1000)]
    assert longest[0] == 8
    assert longest[350] == 36  # halfway by factors: the root of 8 * 160
    assert longest[700] == longest[-1] == 160
    assert all(a <= b for a, b in pairwise(longest))


def test_curriculum_of_the_paper():
    lengths = Lengths(TASKS["arithmetic"], state_tracking.AS_THE_PAPER)
    assert [lengths.longest(step) for step in (0, 5000, 9999)] == [40, 100, 160]
    drawn = [lengths.draw(9999, random.Random(i)) for i in range(200)]
    assert {count for count, _ in drawn} == {256}
    assert min(length for _, length in drawn) < 10
    assert max(length for _, length in drawn) > 150


def test_curriculum_of_mastery():
    """Only good answers at the longest length make it grow, each time shown anew, up to the last."""
    lengths = Lengths(TASKS["arithmetic"], Recipe(steps=10, curriculum="mastery", first=5))
    for _ in range(100):
        lengths.learn(4, 1.0)
        lengths.learn(5, 0.9)
    assert lengths.longest(9) == 5
    while lengths.longest(0) == 5:
        lengths.learn(5, 1.0)
    assert lengths.longest(0) == 6
    lengths.learn(6, 1.0)
    assert lengths.longest(0) == 6
    for _ in range(1000):
        lengths.learn(lengths.longest(0), 1.0)
    assert lengths.longest(0) == 160


def test_curricula_have_names():
    with pytest.raises(ValueError, match="curriculum 'hard' is unknown; choose from factors, mastery, linear"):
        Recipe(steps=1, curriculum="hard")


def test_budget_of_the_paper():
    recipe = state_tracking.recipes("paper")["arithmetic"]
    assert len(recipe.trials) == 16
    assert {trial.d_model for trial in recipe.trials} == {32, 64}
    assert (recipe.learning_rates[0], recipe.learning_rates[-1]) == (1e-4, 1e-2)
    assert recipe.called(recipe.trials[0]) == "width 32, rate 1.0e-04, seed 0"


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    """Logits for every class, the same weights from the same seed, and a step that continues."""
    task = TASKS["a5"]
    model, same = (VARIANTS[name].build(task, Recipe(steps=1), 64, seed=3) for _ in range(2))
    for one, two in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, two)
    ids = task.generate(2, 9, random.Random(0)).ids_bs
    with torch.no_grad():
        logits, _ = model(ids)
        cache, stepped = None, []
        for token in ids.unbind(1):
            last, cache = model.step(token, cache)
            stepped.append(last)
    assert logits.shape == (2, 10, 60)
    torch.testing.assert_close(torch.stack(stepped, 1), logits, rtol=1e-4, atol=1e-4)


def test_fixed_frequencies_depend_on_the_place_alone():
    model = VARIANTS["mamba3-fixed"].build(TASKS["parity"], Recipe(steps=1), 64, seed=0)
    pairs = 32
    with torch.no_grad():
        caches = [model(torch.randint(3, (1, 7)))[1] for _ in range(2)]
    expected = torch.tensor([7 * 10000 ** (-q / pairs) for q in range(pairs)], dtype=torch.float64)
    for cache in caches:
        angle = cache[0].rotation[0, 0].double()
        torch.testing.assert_close(
            torch.polar(torch.ones_like(angle), angle),
            torch.polar(torch.ones(pairs).double(), expected),
            rtol=0,
            atol=1e-5,
        )


def test_training_learns_and_repeats_itself():
    task = replace(TASKS["parity"], lengths=(2, 4, 4), test_length=4)
    recipe = Recipe(steps=80, d_models=(32,), tokens=64, seeds=(1,), test_sequences=64, warmup=10)
    steps = []
    fit = fitting.search(task, VARIANTS["mamba3"], recipe, lambda step, *_: steps.append(step))
    assert steps == list(range(1, 81))
    assert sum(fit.losses[-20:]) < 0.7 * sum(fit.losses[:20])
    assert set(fit.scores) == {1, 4}
    again = fitting.search(task, VARIANTS["mamba3"], replace(recipe, steps=3), lambda *_: None)
    assert fitting.search(task, VARIANTS["mamba3"], replace(recipe, steps=3), lambda *_: None).losses == again.losses


class KilledError(Exception):
    pass


@pytest.mark.parametrize("curriculum", ["factors", "mastery"])
def test_a_killed_search_goes_on_to_the_same_end(curriculum, tmp_path, monkeypatch):
    """Killed in the first trial and in the second: losses, lengths and scores are those of one that was left alone."""
    task = replace(TASKS["parity"], lengths=(2, 4, 6), test_length=8)
    sizes = {"d_models": (16,), "state_rank": 8, "per_head_dim": 16, "tokens": 24, "test_sequences": 16}
    recipe = Recipe(steps=9, seeds=(0, 1), curriculum=curriculum, mastered=0.1, warmup=2, **sizes)
    alone = fitting.search(task, VARIANTS["mamba3"], recipe, lambda *_: None)
    monkeypatch.setattr(interrupted, "EVERY", -1.0)
    path, steps = tmp_path / "stopped" / "it.pt", []

    def kill(at):
        def tell(step, *_):
            steps.append(step)
            if len(steps) == at:
                raise KilledError

        return tell

    for at in (4, 13):
        with pytest.raises(KilledError):
            fitting.search(task, VARIANTS["mamba3"], recipe, kill(at), Interrupted(path))
    with pytest.raises(ValueError, match=r"it.pt is a training that was stopped after 1 trials; --resume goes on"):
        Interrupted(path, resume=False)
    kept = Interrupted(path)
    fit = fitting.search(task, VARIANTS["mamba3"], recipe, kill(0), kept)
    assert steps == [*range(1, 10), *range(1, 10)]
    for name in ("losses", "lengths", "valid_score", "scores", "tried", "trial"):
        assert getattr(fit, name) == getattr(alone, name), name
    kept.remove()
    assert not path.exists()


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "it.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"it.pt is damaged .*; remove it to start again"):
        Interrupted(tmp_path / "it.pt")


def test_seeds_are_chosen_at_validation_length(monkeypatch):
    """The first that has learned it ends the search; without one, the best there, whatever the test says."""
    found = {0: 20.0, 1: 60.0, 2: 40.0}

    def train(task, variant, recipe, trial, progress, kept):
        fit = Fit(task=task.name, variant=variant.name, trial=trial, parameters=0, recipe=recipe)
        fit.valid_score = found[trial.seed]
        return fit, trial.seed

    monkeypatch.setattr(fitting, "train", train)
    monkeypatch.setattr(fitting, "score", lambda task, model, *_: 100.0 - 10 * model)
    arguments = (TASKS["parity"], VARIANTS["mamba3"], Recipe(steps=1), lambda *_: None)
    fit = fitting.search(*arguments)
    assert (fit.trial.seed, fit.scores[256]) == (1, 90.0)
    assert fit.tried == [("0", 20.0), ("1", 60.0), ("2", 40.0)]
    found[0] = 99.9
    assert fitting.search(*arguments).tried == [("0", 99.9)]


def test_the_paper_is_beside_its_own_rows():
    assert state_tracking.paper_figure("parity", "mamba3") == 100
    assert state_tracking.paper_figure("arithmetic", "mamba2") == 47.81
    assert state_tracking.paper_figure("brackets", "mamba3-fixed") == 2.62
    assert state_tracking.paper_figure("a5", "mamba3") is None
    assert state_tracking.paper_figure("parity", "mamba3-quaternion") is None


def test_state_tracking_command(tmp_path, capsys):
    """Rows of an earlier run stay in the table."""
    command = ["experiment", "state-tracking", "--out", str(tmp_path), *TINY]
    assert main([*command, "--quick", "--variant", "mamba2"]) == 0
    assert "Mamba-2" in capsys.readouterr().out
    assert main([*command, "--task", "recall", "--variant", "mamba3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert [(row["task"], row["variant"]) for row in printed["rows"]] == [("parity", "mamba2"), ("recall", "mamba3")]
    assert set(printed["rows"][0]["scores"]) == {"40", "160", "208", "256"}
    for name in report.FILES[1:]:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "results.json").stat().st_mtime_ns
    assert main([*command, "--task", "recall", "--variant", "mamba3", "--resume"]) == 0
    assert (tmp_path / "results.json").stat().st_mtime_ns == before, "what is done is not done again"
    assert not list(tmp_path.glob("stopped/*.pt"))


def test_the_paper_command(tmp_path, capsys):
    """16 trials of it, here of one step each."""
    steps = ["--steps", "1", "--sequences", "2"]
    run = ["experiment", "state-tracking", "--paper", "--task", "parity", "--variant", "mamba2", *steps]
    assert main([*run, "--out", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert len(row["tried"]) == 16
    assert row["recipe"]["sequences"] == 256
    assert row["taken"] in {name for name, _ in row["tried"]}


def test_rows_from_before_there_were_trials(tmp_path):
    row = {"task": "parity", "variant": "mamba3", "seed": 1, "tried": [[0, 20.0], [1, 60.0]]}
    (tmp_path / "results.json").write_text(json.dumps({"rows": [row]}))
    (read,) = report.load_rows(tmp_path / "results.json")
    assert report.tried(read) == "(0), 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "primes"], "task primes is unknown; choose from parity, arithmetic, brackets, a5, recall"),
        (["--variant", "gpt"], "model gpt is unknown; choose from mamba3, "),
        (["--task", "a5", "--variant", "mamba2"], "none of mamba2 is compared on a5"),
        (["--steps", "0"], "steps = 0 has to be positive"),
        (["--quick", "--paper"], "--quick and --paper are two budgets; choose one"),
        (["--sequences", "-1"], "test_sequences = -1 has to be positive"),
    ],
)
def test_state_tracking_errors(arguments, message, tmp_path, capsys):
    assert main(["experiment", "state-tracking", "--out", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_foreign_file_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "results.json").write_text("mine")
    assert main(["experiment", "state-tracking", "--quick", *TINY, "--out", str(tmp_path)]) == 2
    assert "holds no results of this experiment" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == "mine"


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["experiment", "state-tracking", "--quick", *TINY, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("experiment: an experiment needs matplotlib: pip install matplotlib\n")


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["experiment", "--help"])
    assert re.search(r"example:\n  mambakit experiment", capsys.readouterr().out)


def test_digits_are_held_out():
    found = digits.load()
    assert found.train_bs.shape == (1437, 64)
    assert found.test_bs.shape == (360, 64)
    assert 0 <= found.train_bs.min() < found.train_bs.max() == 1
    assert set(found.test_b.tolist()) == set(range(10))
    assert torch.equal(digits.load().test_bs, found.test_bs)


def test_pixels_come_with_their_places():
    image = torch.rand(1, 64)
    token = digits.tokens(image)[0, 8 * 3 + 5]
    assert token[0] == image[0, 29]
    assert token[1:].nonzero()[:, 0].tolist() == [3, 8 + 5]


def test_principal_components_are_exact_with_all_of_them():
    found = digits.load()
    torch.testing.assert_close(digits.principal_components(found, 64), found.test_bs, rtol=0, atol=1e-4)


def test_digits_command(tmp_path, capsys, monkeypatch):
    few = digits.Digits(*(part[:64] for part in digits.load()))
    monkeypatch.setattr(digits, "load", lambda: few)
    assert main(["experiment", "digits", "--epochs", "2", "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert 0 <= printed["classifier"]["accuracy"] <= 100
    assert printed["autoencoder"]["error"] < 0.5
    for name in digits.FILES[1:]:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert main(["experiment", "digits", "--epochs", "0", "--out", str(tmp_path)]) == 2
    assert "epochs = 0 has to be positive" in capsys.readouterr().err
