"""Constrained text: every finished answer has the form that was asked for, whatever the model would rather say."""

import json
import os
import re
import sys

import pytest
import torch

import mambakit as mk
from mambakit.inference import Engine
from mambakit.inference.constraints import Constraint, table
from mambakit.text.tokens import Bytes, TokenizerFile

SEEDS = 36
CLOSED = {"additionalProperties": False}
SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        **CLOSED,
    },
    "enum": {"enum": ["red", "green", 3, None, {"deep": [1]}]},
    "array": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 2, "maxItems": 5},
    "nested": {
        "type": "object",
        "properties": {
            "points": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}},
                    "required": ["x"],
                    **CLOSED,
                },
            }
        },
        "required": ["points"],
        **CLOSED,
    },
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.5},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}, {"type": "array", "maxItems": 0}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
    "boolean": {"type": "boolean"},
    "const": {"const": {"kind": "fixed", "value": [1, 2, "three"]}},
    "string": {"type": "string", "minLength": 2, "maxLength": 12},
}
TREE: dict = {
    "type": "object",
    "properties": {"value": {"type": "number"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["value", "children"],
    **CLOSED,
}
UNBOUNDED = {
    "string": {"type": "string"},
    "number": {"type": "number"},
    "integers": {"type": "array", "items": {"type": "integer"}},
    "anything": {},
    "any object": {"type": "object"},
    "tree": TREE,
    "map": {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": {"type": "string"}}},
    "record": {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["title", "score", "tags"],
        **CLOSED,
    },
    "pattern": {"type": "string", "pattern": "^[a-y]+z$"},
    "rows": {"type": "array", "minItems": 3, "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1}},
}
"""Forms in which a text may go on for ever."""
ANSWERS = int(os.environ.get("MAMBAKIT_ANSWERS", "60"))


def holds(schema: dict, value: object) -> bool:
    """JSON Schema's rules, as far as the schemas here use them."""
    kinds = {"object": dict, "array": list, "string": str, "number": int | float, "integer": int, "boolean": bool}
    if "$ref" in schema:
        return holds(TREE, value)
    kind, is_bool = schema.get("type"), isinstance(value, bool)
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(holds(one, value) for one in schema["anyOf"]):
        return False
    if kind == "null":
        return value is None
    if kind is not None and (not isinstance(value, kinds[kind]) or is_bool != (kind == "boolean")):
        return False
    if isinstance(value, int | float) and not is_bool:
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(holds(schema.get("items", {}), one) for one in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        closed = schema.get("additionalProperties") is False
        fits = value.keys() >= set(schema.get("required", ())) and not (closed and value.keys() - known.keys())
        more = schema.get("additionalProperties") or {}
        return fits and all(holds(known.get(name, more), one) for name, one in value.items())
    return True


def make(vocab_size: int = 257) -> mk.LanguageModel:
    torch.manual_seed(0)
    block = mk.Mamba2Config(d_model=16, state_rank=8, per_head_dim=8)
    return mk.LanguageModel(mk.ModelConfig(block=block, n_layer=2, vocab_size=vocab_size))


def one(constraint: dict, vocab_size: int = 257, tokenizer: object = None, **more):
    engine = Engine(make(vocab_size), tokenizer=tokenizer or Bytes())
    request = engine.add([65], constraint=constraint, **{"max_new_tokens": 300, "seed": 0, **more})
    engine.run()
    return request


def test_the_check_itself():
    for name, wrong in {
        "object": {"name": "a", "age": 151},
        "enum": "blue",
        "array": [1],
        "nested": {"points": [{"x": 1}]},
        "number": 3,
        "any of": "long",
        "pattern": "AB-",
        "boolean": 1,
        "const": {"kind": "fixed"},
        "string": "a",
    }.items():
        assert not holds(SCHEMAS[name], wrong), name


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_schemas(name):
    engine = Engine(make(), tokenizer=Bytes())
    kinds = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 50}, {"repetition_penalty": 1.3}]
    requests = [
        engine.add([i, 66], max_new_tokens=400, seed=i, constraint=SCHEMAS[name], **kinds[i % 4]) for i in range(SEEDS)
    ]
    engine.run()
    for request in requests:
        assert request.finish_reason == "stop"
        assert holds(SCHEMAS[name], json.loads(request.text)), request.text
    assert name in ("const", "boolean") or len({request.text for request in requests}) > 2


@pytest.mark.parametrize("name", UNBOUNDED)
def test_every_answer_is_whole(name):
    """Whatever the form allows, a text comes to its end within its limit; MAMBAKIT_ANSWERS asks for more of them."""
    engine = Engine(make(), tokenizer=Bytes())
    kinds = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 50}, {"repetition_penalty": 1.3}]
    limits = (60, 61, 75, 100, 200)
    requests = [
        engine.add([i % 256, 66], max_new_tokens=limits[i % 5], seed=i, constraint=UNBOUNDED[name], **kinds[i % 4])
        for i in range(ANSWERS)
    ]
    engine.run()
    for request in requests:
        assert request.finish_reason == "stop"
        assert len(request.tokens) <= request.max_new_tokens
        assert holds(UNBOUNDED[name], json.loads(request.text)), request.text
    assert name == "number" or max(len(request.tokens) for request in requests) > 50, "they use what they may"


def test_a_limit_that_is_just_enough():
    """The shortest text of a form, from one token less than it needs on."""
    for schema, text in (
        (SCHEMAS["const"], '{"kind":"fixed","value":[1,2,"three"]}'),
        (UNBOUNDED["record"], '{"title":"","score":0,"tags":["",""]}'),
        (UNBOUNDED["rows"], "[[true],[true],[true]]"),
        ({"type": "string", "minLength": 20}, '"aaaaaaaaaaaaaaaaaaaa"'),
    ):
        for spare in (-1, 0, 1, 5):
            request = one(schema, max_new_tokens=len(text) + spare)
            assert request.finish_reason == ("length" if spare < 0 else "stop"), request.text
            assert spare < 0 or holds(schema, json.loads(request.text))
    for seed in range(SEEDS):
        made = one({"type": "integer"}, max_new_tokens=1 + seed % 5, seed=seed)
        assert made.finish_reason == "stop"
        int(made.text)
        without_an_end = one({"regex": "-[0-9]+"}, max_new_tokens=4, seed=seed, vocab_size=256)
        assert without_an_end.finish_reason == "stop"


def test_a_form_without_an_end():
    """Which nobody looks for longer than it takes to say so."""
    forever = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], **CLOSED}
    request = one(forever, max_new_tokens=10**12, stop=[34])
    assert request.finish_reason == "stop"


class TestOtherForms:
    def test_regular_expressions(self):
        for seed in range(SEEDS):
            request = one({"regex": "(ab|c){2,4}-[0-9]+x"}, seed=seed)
            assert request.finish_reason == "stop"
            assert re.fullmatch("(ab|c){2,4}-[0-9]+x", request.text)

    def test_an_end_that_the_model_chooses(self):
        texts = set()
        for seed in range(SEEDS):
            request = one({"regex": "a*"}, seed=seed)
            assert request.finish_reason == "stop"
            assert request.tokens[-1] == Bytes.end
            texts.add(request.text)
        assert len(texts) > 1
        assert all(set(text) <= {"a"} for text in texts)

    def test_grammars(self):
        grammar = 'start: sum\nsum: number | sum "+" number\nnumber: /[0-9]{1,2}/ | "(" sum ")"\n'
        for request in [one({"grammar": grammar}, seed=seed) for seed in range(SEEDS)]:
            assert request.finish_reason == "stop"
            assert re.fullmatch("[0-9()+]+", request.text)
            eval(re.sub("[0-9]+", "1", request.text))

    def test_stops_and_lengths_end_it_too(self):
        cut = one({"regex": "a{20}b{20}"}, stop="ab")
        assert (cut.finish_reason, cut.text) == ("stop", "a" * 19)
        short = one({"regex": "a{20}b{20}"}, max_new_tokens=5)
        assert (short.finish_reason, short.text) == ("length", "aaaaa")
        exact = one({"regex": "a{5}"}, max_new_tokens=5)
        assert (exact.finish_reason, exact.text) == ("stop", "aaaaa")


def test_what_is_forced_is_not_drawn(monkeypatch):
    """Nor lost to the penalty for what was said."""
    model, drawn, choose = make(), [], mk.inference.sampling.Sampler.choose

    def noted(self, logits_bw, seen_bw, uniform_b):
        drawn.append(seen_bw[0].nonzero()[:, 0].tolist())
        return choose(self, logits_bw, seen_bw, uniform_b)

    monkeypatch.setattr(mk.inference.sampling.Sampler, "choose", noted)
    engine = Engine(model, tokenizer=Bytes())
    request = engine.add([65], 50, seed=1, repetition_penalty=1.5, constraint={"regex": "abc[xy]de[xy]"})
    engine.run()
    assert re.fullmatch("abc[xy]de[xy]", request.text)
    assert drawn == [sorted({65, *request.tokens[:place]}) for place in (3, 6)]


def test_others_are_left_alone():
    model = make()
    engine, free = Engine(model, tokenizer=Bytes()), {}
    for i in range(12):
        if i % 2:
            engine.add([i], max_new_tokens=60, seed=i, constraint=list(SCHEMAS.values())[i % 10])
        else:
            free[i] = engine.add([i], max_new_tokens=40, seed=i, temperature=0.5 * (i % 3), logprobs=2)
        engine.step()
    engine.run()
    for i, request in free.items():
        alone = Engine(model)
        want = alone.add([i], max_new_tokens=40, seed=i, temperature=0.5 * (i % 3), logprobs=2)
        alone.run()
        assert request.tokens == want.tokens
        assert request.logprobs == want.logprobs


def test_constrained_rows_are_as_alone():
    model, schemas = make(), list(SCHEMAS.values())
    engine = Engine(model, tokenizer=Bytes())
    requests = [engine.add([i], max_new_tokens=60, seed=i, constraint=schemas[i]) for i in range(10)]
    engine.run()
    for i, request in enumerate(requests):
        run = mk.stream(model, [i], max_new_tokens=60, seed=i, constraint=schemas[i], tokenizer=Bytes())
        assert [int(token) for token in run] == request.tokens


def test_generate_ends_each_row_for_itself():
    told = mk.generate(
        make(), [[1], [2], [3]], max_new_tokens=50, seed=3, pad_id=0, constraint=SCHEMAS["array"], tokenizer=Bytes()
    )
    texts = [Bytes().decode([i for i in row if i]) for row in told.tolist()]
    assert len(set(texts)) > 1
    for text in texts:
        assert holds(SCHEMAS["array"], json.loads(text))


class TestVocabularies:
    def test_without_an_end(self):
        request = one({"regex": "a{1,7}"}, vocab_size=256)
        assert (request.finish_reason, request.text) == ("stop", "aaaaaaa")

    def test_with_more_ids_than_the_tokenizer(self):
        for seed in range(8):
            assert one({"regex": "[ab]{3}"}, vocab_size=320, seed=seed).finish_reason == "stop"

    def test_one_that_lacks_what_is_needed(self):
        engine = Engine(make(100), tokenizer=Bytes())
        with pytest.raises(ValueError, match="allows none of the model's tokens"):
            engine.add([1], constraint={"regex": "z"})
        later = engine.add([1], constraint={"regex": "Az"}, max_new_tokens=5)
        other = engine.add([1], constraint={"regex": "A"}, max_new_tokens=5)
        engine.run()
        assert (later.finish_reason, other.finish_reason) == ("error", "stop")
        assert "allows none of the model's tokens" in str(later.error)

    @pytest.mark.parametrize("specials", [["<|endoftext|>"], []])
    def test_a_tokenizer_file(self, tmp_path, specials):
        tokenizers = pytest.importorskip("tokenizers")
        alphabet = tokenizers.pre_tokenizers.ByteLevel
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer, made.decoder = alphabet(add_prefix_space=False), tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=330, special_tokens=specials, initial_alphabet=alphabet.alphabet(), show_progress=False
        )
        made.train_from_iterator(['{"name": "Ann", "age": 12}', "true false"] * 9, trainer)
        made.enable_truncation(3)
        made.save(str(tmp_path / "tokenizer.json"))
        tokens = TokenizerFile(tmp_path / "tokenizer.json")
        long = 0
        for seed in range(SEEDS):
            request = one(SCHEMAS["object"], tokens.vocab_size, tokens, seed=seed)
            assert request.finish_reason == "stop"
            assert holds(SCHEMAS["object"], json.loads(request.text))
            long += len(request.tokens) < len(request.text.encode())
            assert one({"regex": "a*"}, tokens.vocab_size, tokens, seed=seed).tokens[-1] == tokens.end
        assert long

    def test_the_table_is_made_once(self):
        tokens = Bytes()
        assert table(tokens) is table(tokens)


class TestTrouble:
    @pytest.mark.parametrize(
        ("constraint", "told"),
        [
            ({"type": "nonsense"}, "cannot be compiled: Invalid type: nonsense"),
            ({"type": "object", "propertyNames": {"pattern": "a"}}, "cannot be compiled: Unimplemented keys"),
            ({"type": "integer", "minimum": 5, "maximum": 3}, "cannot be compiled: Unsatisfiable"),
            ({"type": "string", "pattern": "("}, "cannot be compiled"),
            ({"const": float("nan")}, "is not a JSON schema"),
            ({"const": object()}, "is not a JSON schema"),
            ({"regex": "(a"}, "cannot be compiled.*unclosed group"),
            ({"regex": "(" * 9999}, "cannot be compiled"),
            ({"grammar": 'begin: "a"'}, "cannot be compiled: no start rule"),
            ({"regex": "a", "grammar": "b"}, "'regex', 'grammar', expected one of"),
            ({"regex": "a", "type": "string"}, "'regex', 'type', expected one of"),
            ({"regex": 5}, "regex 5, expected a string"),
            ("a", "constraint is 'a', expected a JSON schema"),
            (True, "constraint is True, expected a JSON schema"),
        ],
    )
    def test_what_cannot_be_compiled(self, constraint, told):
        engine = Engine(make(), tokenizer=Bytes())
        with pytest.raises(ValueError, match=told) as raised:
            engine.add([1], constraint=constraint)
        assert engine.waiting == 0
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400
        with pytest.raises(ValueError, match=told):
            mk.generate(make(), [1], max_new_tokens=1, constraint=constraint, tokenizer=Bytes())

    def test_a_schema_nested_too_deeply(self):
        schema: dict = {"type": "boolean"}
        for _ in range(5000):
            schema = {"type": "array", "items": schema}
        with pytest.raises(ValueError, match="constraint"):
            Constraint(schema, Bytes(), 257)

    def test_without_a_tokenizer(self):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            Engine(make()).add([1], constraint={"regex": "a"})
        with pytest.raises(ValueError, match="needs a tokenizer"):
            mk.generate(make(), [1], max_new_tokens=1, constraint={"regex": "a"})
        with pytest.raises(ValueError, match="is a object"):
            Engine(make(), tokenizer=object()).add([1], constraint={"regex": "a"})

    def test_without_the_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ImportError, match="a constraint needs llguidance: pip install llguidance"):
            Engine(make(), tokenizer=Bytes()).add([1], constraint={"regex": "a"})

    def test_a_token_that_does_not_fit(self):
        own = Constraint({"regex": "ab"}, Bytes(), 257)
        with pytest.raises(ValueError, match="cannot go on with token 120"):
            own.take(120)

    def test_a_failure_on_the_way_is_its_own(self, monkeypatch):
        engine = Engine(make(), tokenizer=Bytes())
        bad = engine.add([1], constraint={"regex": "a{9}"})
        good = engine.add([2], constraint={"regex": "b{9}"})
        free = engine.add([3], max_new_tokens=9)
        take = bad.constraint.take

        def failing(token: int) -> int:
            return take(0 if len(bad.tokens) == 4 else token)

        monkeypatch.setattr(bad.constraint, "take", failing)
        engine.run()
        assert [one.finish_reason for one in (bad, good, free)] == ["error", "stop", "length"]
        assert "cannot go on with token 0" in str(bad.error)
        assert good.text == "b" * 9
