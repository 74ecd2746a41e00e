"""transformers' loading, generation, pipeline, Trainer and peft around mambakit's models."""

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import mambakit as mk
from mambakit.blocks.param_groups import param_groups
from mambakit.compat.auto import MambakitConfig, MambakitForCausalLM
from test_checkpoints import assert_same
from their_releases import CHECKPOINTING, calls_of

HEADS = {"d_model": 32, "state_rank": 8, "per_head_dim": 16}
BLOCKS = {
    "mamba1": mk.Mamba1Config(d_model=32, state_rank=8),
    "mamba2": mk.Mamba2Config(**HEADS),
    "mamba3": mk.Mamba3Config(**HEADS),
}
PAD = {"pad_token_id": 0}


def make(name: str = "mamba2", **options) -> mk.LanguageModel:
    """With weights large enough that what comes next depends on what was before."""
    model = mk.LanguageModel(mk.ModelConfig(block=BLOCKS[name], **{"n_layer": 2, "vocab_size": 45, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def wrapped(name: str = "mamba2", **options) -> MambakitForCausalLM:
    return MambakitForCausalLM.wrap(make(name, **options)).eval()


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = [[5, 17, 3], [11, 2, 9, 30, 30, 1, 4], [44]]


class TestFiles:
    @pytest.mark.parametrize("name", BLOCKS)
    @pytest.mark.parametrize("tied", [True, False])
    def test_round_trip(self, name, tied, tmp_path):
        model = make(name, tie_embeddings=tied)
        mk.save_model(model, tmp_path / "ours")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert isinstance(loaded, MambakitForCausalLM)
        assert not loaded.training
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert_same(loaded.language_model, model)
        loaded.save_pretrained(tmp_path / "theirs")
        assert_same(mk.load_model(tmp_path / "theirs"), model)
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "theirs" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()

    def test_official_weights(self, tmp_path):
        model = make()
        mk.save_model(model, tmp_path, format="official")
        assert_same(MambakitForCausalLM.from_pretrained(tmp_path).language_model, model)

    def test_dtype_and_device(self, tmp_path):
        mk.save_model(make(), tmp_path)
        for dtype in ("bfloat16", torch.bfloat16):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, device_map={"": "cpu"})
            assert loaded.dtype == torch.bfloat16
            assert loaded.get_parameter("backbone.layers.0.mixer.A_log").dtype == torch.float32
        assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32

    def test_saving_keeps_company_and_drops_stale_parts(self, tmp_path):
        model = wrapped()
        model.generation_config.max_new_tokens = 7
        (tmp_path / "checkpoint-1").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        model.save_pretrained(tmp_path, max_shard_size=4000)
        assert (tmp_path / "model.safetensors.index.json").exists()
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {"checkpoint-1", "notes.txt", "config.json", "generation_config.json", "model.safetensors"}
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert again.generation_config.max_new_tokens == 7
        assert_same(again.language_model, model.language_model)

    def test_config(self, tmp_path):
        model = make()
        mk.save_model(model, tmp_path / "model")
        config = AutoConfig.from_pretrained(tmp_path / "model")
        assert isinstance(config, MambakitConfig)
        assert config.model_config == model.config
        assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (45, 32, 2)
        config.save_pretrained(tmp_path / "config")
        written, ours = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("config", "model"))
        assert written == ours
        new = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        assert new.dtype == torch.bfloat16
        assert new.backbone.layers[0].mixer.A_log.dtype == torch.float32
        assert new.lm_head.weight is new.backbone.embedding.weight


class TestForward:
    @pytest.mark.parametrize("name", BLOCKS)
    def test_logits_and_loss(self, name):
        model = wrapped(name)
        ids = torch.randint(0, 45, (3, 9))
        want = model.language_model(ids)[0]
        labels = ids.clone()
        labels[0, :4] = -100
        got = model(ids, labels=labels)
        assert torch.equal(got.logits, want)
        loss = F.cross_entropy(want[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        torch.testing.assert_close(got.loss, loss)
        halved = model(ids, labels=labels, num_items_in_batch=2 * int((labels[:, 1:] != -100).sum())).loss
        torch.testing.assert_close(halved, loss / 2)
        torch.testing.assert_close(model(ids, logits_to_keep=1).logits, want[:, -1:], rtol=1e-4, atol=1e-5)
        assert torch.equal(model(ids, return_dict=False)[0], want)

    @pytest.mark.parametrize("name", BLOCKS)
    def test_padding_on_either_side_has_no_effect(self, name):
        model, batch = wrapped(name), padded(PROMPTS)
        left = model(**batch).logits
        right = model(**{key: value.flip(1) for key, value in padded([p[::-1] for p in PROMPTS]).items()}).logits
        for i, prompt in enumerate(PROMPTS):
            want = model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(left[i, -len(prompt) :], want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(right[i, : len(prompt)], want, rtol=1e-4, atol=1e-5)

    @torch.no_grad()
    def test_a_cache_continues(self):
        model, ids = wrapped(), torch.randint(0, 45, (2, 9))
        first = model(ids[:, :5])
        before = copy.deepcopy(first.cache_params)
        second = model(inputs_embeds=model.get_input_embeddings()(ids[:, 5:]), cache_params=first.cache_params)
        want = model(ids).logits
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), want, rtol=1e-4, atol=1e-5)
        assert second.cache_params.get_seq_length() == 9
        assert torch.equal(first.cache_params.states[0][0], before.states[0][0])
        assert model.train()(ids).cache_params is None

    def test_checkpointing_changes_no_gradient(self):
        model, ids = wrapped().train(), torch.randint(0, 45, (2, 9))
        layer = model.backbone.layers[0].mixer

        def gradients():
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            return {name: parameter.grad for name, parameter in model.named_parameters()}

        want = gradients()
        getattr(model, f"{CHECKPOINTING}_enable")()
        assert getattr(model, f"is_{CHECKPOINTING}")
        assert calls_of(layer, gradients) == 2
        got = gradients()
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=lambda text, name=name: name + text)
        getattr(model, f"{CHECKPOINTING}_disable")()
        assert not getattr(model, f"is_{CHECKPOINTING}")
        assert calls_of(layer, gradients) == 1


class TestGenerate:
    @pytest.mark.parametrize("name", BLOCKS)
    def test_greedy_and_padded(self, name):
        model = wrapped(name)
        got = model.generate(**padded(PROMPTS), max_new_tokens=12, do_sample=False, **PAD)[:, 7:]
        assert torch.equal(got, mk.generate(model.language_model, PROMPTS, max_new_tokens=12, temperature=0))
        for row, prompt in zip(got, PROMPTS, strict=True):
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, **PAD)
            assert torch.equal(alone[0, len(prompt) :], row)

    @pytest.mark.parametrize(
        "settings",
        [{"do_sample": True, "top_k": 20, "num_return_sequences": 2}, {"num_beams": 4}],
        ids=["sample", "beams"],
    )
    def test_with_and_without_a_cache(self, settings):
        model = wrapped()
        results = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            results.append(model.generate(**padded(PROMPTS), max_new_tokens=12, use_cache=use_cache, **settings, **PAD))
        assert torch.equal(*results)

    def test_beams_take_their_states_along(self, monkeypatch):
        """The test above can fail: beams do change places."""
        model, settings = wrapped(), {"max_new_tokens": 12, "num_beams": 4, **PAD}
        want = model.generate(**padded(PROMPTS), **settings)
        monkeypatch.setattr(MambakitForCausalLM, "_reorder_cache", lambda self, cache, rows: cache)
        assert not torch.equal(model.generate(**padded(PROMPTS), **settings), want)

    def test_going_on_from_a_cache(self):
        model, ids = wrapped(), torch.tensor([PROMPTS[1]])
        settings = {"do_sample": False, **PAD}
        first = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **settings)
        assert first.past_key_values.get_seq_length() == 7 + 5 - 1
        text = torch.cat([first.sequences, torch.tensor([[8, 9]])], 1)
        want = model.generate(text, max_new_tokens=5, **settings)
        assert torch.equal(model.generate(text, cache_params=first.past_key_values, max_new_tokens=5, **settings), want)
        with pytest.raises(ValueError, match="has seen 11 tokens, and input_ids has 3"):
            model.generate(text[:, :3], cache_params=first.past_key_values, max_new_tokens=5, **settings)

    def test_pipeline(self, tmp_path):
        model = make()
        mk.save_model(model, tmp_path)
        words = {f"w{i}": i for i in range(45)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", padding_side="left")
        fast.save_pretrained(tmp_path)
        pipe = transformers.pipeline("text-generation", model=str(tmp_path), device="cpu")
        texts = [" ".join(f"w{i}" for i in prompt) for prompt in PROMPTS]
        got = pipe(texts, batch_size=3, max_new_tokens=6, do_sample=False, return_full_text=False)
        want = mk.generate(model, PROMPTS, max_new_tokens=6, temperature=0)
        for answer, row in zip(got, want.tolist(), strict=True):
            assert answer[0]["generated_text"].split() == [f"w{i}" for i in row if i]  # padding is not shown


class Lines(torch.utils.data.Dataset):
    """Counting upwards from anywhere."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        ids = torch.arange(i, i + 12) % 45
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def trainer(model, folder: Path, **options) -> Trainer:
    settings = {"max_steps": 12, "save_steps": 6, "learning_rate": 1e-2, "logging_steps": 3, **options}
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True, **settings
    )
    # Decays and biases are not to decay, which Trainer does not know.
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=settings["learning_rate"])
    return Trainer(model=model, args=arguments, train_dataset=Lines(), optimizers=(optimizer, None))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
class TestTrainer:
    def test_training_saving_resuming(self, tmp_path):
        start = make()
        model = MambakitForCausalLM.wrap(copy.deepcopy(start))
        run = trainer(model, tmp_path, **{CHECKPOINTING: True})
        assert calls_of(model.backbone.layers[0].mixer, run.train) == 2 * 12
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        assert losses[-1] < 0.7 * losses[0]
        run.save_model()
        assert_same(mk.load_model(tmp_path), run.model.language_model)
        assert_same(mk.load_model(tmp_path / "checkpoint-12"), run.model.language_model)

        again = trainer(MambakitForCausalLM.wrap(start), tmp_path)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(again.model.get_parameter(name), parameter, rtol=1e-3, atol=1e-5)

    def test_adapters(self, tmp_path):
        model = wrapped()
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["in_proj", "out_proj"], r=4)
        adapted = peft.get_peft_model(model, config)
        run = trainer(adapted, tmp_path / "run", save_steps=12)
        run.train()
        ids = torch.randint(0, 45, (2, 9))
        want = adapted.eval()(ids).logits
        mk.save_model(rebuilt(before), tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert not torch.allclose(base(ids).logits, want, atol=1e-2)
        again = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "checkpoint-12").eval()
        torch.testing.assert_close(again(ids).logits, want)
        tokens = again.generate(input_ids=ids, max_new_tokens=5, do_sample=False, **PAD)
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-4)
        assert torch.equal(tokens[:, 9:], mk.generate(merged.language_model, ids, max_new_tokens=5, temperature=0))
        merged.save_pretrained(tmp_path / "merged")
        assert_same(mk.load_model(tmp_path / "merged"), merged.language_model)


def rebuilt(parameters: dict[str, torch.Tensor]) -> mk.LanguageModel:
    model = make()
    model.load_state_dict(parameters, strict=False)
    return model


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"attn_implementation": "sdpa"}, "no use for attn_implementation"),
            ({"quantization_config": {"load_in_8bit": True}}, "no use for quantization_config"),
            ({"spelled_wrong": 1}, "no use for spelled_wrong"),
            ({"device_map": "auto"}, "on one device"),
            ({"dtype": "float31"}, "dtype = 'float31'"),
            ({"norm_group_size": 3}, "norm_group_size"),
        ],
    )
    def test_loading(self, options, message, tmp_path):
        mk.save_model(make(), tmp_path)
        with pytest.raises(ValueError, match=message):
            MambakitForCausalLM.from_pretrained(tmp_path, **options)

    def test_typos_reach_the_model_through_auto(self, tmp_path):
        mk.save_model(make(), tmp_path)
        with pytest.raises(ValueError, match="no use for spelled_wrong"):
            AutoModelForCausalLM.from_pretrained(tmp_path, spelled_wrong=1)

    def test_another_config(self, tmp_path):
        mk.save_model(make(), tmp_path)
        with pytest.raises(ValueError, match="the config differs"):
            AutoModelForCausalLM.from_pretrained(tmp_path, config=wrapped(vocab_size=50).config)
        with pytest.raises(ValueError, match="unknown fields hidden_dropout"):
            MambakitConfig(model=make().config.to_dict(), hidden_dropout=0.1)
        with pytest.raises(ValueError, match=r"block\.family"):
            MambakitConfig(model={})

    def test_saving(self, tmp_path):
        with pytest.raises(ValueError, match="without push_to_hub, variant"):
            wrapped().save_pretrained(tmp_path, push_to_hub=True, variant="fp16")

    def test_calls(self):
        model, ids = wrapped(), torch.tensor([[1, 2, 3]])
        with pytest.raises(TypeError, match="position_ids"):
            model(ids, position_ids=ids)
        with pytest.raises(ValueError, match="hidden states are not kept"):
            model(ids, output_hidden_states=True)
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model()
        with pytest.raises(ValueError, match=r"attention_mask is \(1, 2\), expected a flag per token, \(1, 3\)"):
            model(ids, attention_mask=torch.ones(1, 2))
        with pytest.raises(ValueError, match="keeps its vocabulary"):
            model.resize_token_embeddings(50)
        for options in ({f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}, {"every_n_layers": 2}, {"offload": True}):
            with pytest.raises(ValueError, match="one by one"):
                getattr(model, f"{CHECKPOINTING}_enable")(**options)
        latents = make(stack_latents=("start",))
        with pytest.raises(ValueError, match="latents"):
            MambakitForCausalLM.wrap(latents)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cache_implementation": "static"}, "is for attention"),
            ({"attention_mask": torch.tensor([[1, 1, 0]])}, "pad on the left"),
            ({"spelled_wrong": 1}, "not used by the model.*spelled_wrong"),
            ({"prompt_lookup_num_tokens": 2}, "not supported with stateful models"),
            ({"prefill_chunk_size": 2}, "without a cache"),
        ],
    )
    def test_generating(self, options, message):
        with pytest.raises(ValueError, match=message):
            wrapped().generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, **options, **PAD)
