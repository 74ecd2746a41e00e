"""All that takes a language model takes one of several kinds of blocks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import mambakit as mk
from compare import check, with_gradients
from hybrid_models import KINDS, theirs
from mambakit import caches
from mambakit.checkpoints.hub import HUB
from mambakit.cli.main import main
from mambakit.compat.auto import MambakitForCausalLM
from mambakit.inference.decoder import Decoder, make_decoder
from mambakit.inference.export import export_step
from mambakit.kernels.cpu.library import why_missing
from mambakit.models.quantized_linear import QuantizedLinear
from mambakit.text.tokens import Bytes
from mambakit.tools.checks import checks_of
from mambakit.training.segments import run_in_segments
from test_hybrids import close, load
from test_stack import flat

HEADS = {"d_model": 32, "state_rank": 8, "per_head_dim": 8}
M1 = mk.Mamba1Config(d_model=32, state_rank=8, dt_b_c_norm=True)
M2, M3, MLP = mk.Mamba2Config(**HEADS), mk.Mamba3Config(**HEADS), mk.MLPConfig(32, 40)
LATENT = mk.MoEConfig(32, 16, 4, 2, "sigmoid", d_shared=24, d_latent=16)
MODELS = {
    "dense": ((M2, MLP), (mk.AttentionConfig(32, 4, 2, rope_theta=1e4), MLP), (M1, MLP)),
    "experts": ((M2, mk.MoEConfig(32, 16, 4, 2)), (mk.AttentionConfig(32, 2, window=5),), (LATENT,), (M3,)),
    "parallel": ((mk.ParallelConfig(M2, mk.AttentionConfig(32, 4, rope_theta=1e4, window=6)), MLP), (M3,)),
}
every = pytest.mark.parametrize("name", MODELS)
PROMPTS = [[5, 17, 3], [11, 2, 9, 30, 30, 1, 4, 8, 20], [44]]


def make(name: str, dtype: torch.dtype = torch.float32, vocab_size: int = 45) -> mk.LanguageModel:
    """With weights large enough that what comes next depends on what was before."""
    torch.manual_seed(0)
    config = mk.ModelConfig(layers=MODELS[name], vocab_size=vocab_size, residual_scale=0.7, tie_embeddings=False)
    model = mk.LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(45, (rows, tokens), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def greedy(model: mk.LanguageModel, prompt: list[int], new: int) -> list[int]:
    """By whole calls, without a cache."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
    return tokens[len(prompt) :]


@every
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_prompts_of_different_lengths(name, backend):
    model = make(name)
    want = [greedy(model, prompt, 9) for prompt in PROMPTS]
    found = mk.generate(model, PROMPTS, max_new_tokens=9, temperature=0, backend=backend)
    assert found.tolist() == want
    streamed = list(mk.stream(model, PROMPTS, max_new_tokens=9, temperature=0, backend=backend))
    assert torch.stack([torch.as_tensor(token) for token in streamed], 1).tolist() == want


@every
def test_prefixes_are_reused(name):
    model, kept = make(name), mk.PrefixCache()
    start = ids(1, 20)[0].tolist()
    settings = {"max_new_tokens": 8, "temperature": 0, "prefix_cache": kept}
    mk.generate(model, [start], **settings)
    longer = [[*start, 3, 4], [*start, 7], start[:12]]
    found = mk.generate(model, longer, **settings)
    assert found.tolist() == [greedy(model, prompt, 8) for prompt in longer]
    assert kept.hits
    assert kept.reused_tokens >= 40


@every
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_quantized(name, bits):
    model = mk.quantize(make(name), bits)
    quantized = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    projections = {n for n, m in make(name).named_modules() if isinstance(m, torch.nn.Linear)}
    experts = {n for n, _ in make(name).named_parameters() if n.endswith(("experts_in", "experts_out"))}
    assert quantized == {n for n in projections if not n.endswith(("router", "dt_proj"))} | experts
    found = mk.generate(model, PROMPTS, max_new_tokens=6, temperature=0)
    assert found.tolist() == [greedy(model, prompt, 6) for prompt in PROMPTS]


@torch.no_grad()
def check_one_call_per_token(model: mk.LanguageModel) -> None:
    tokens = ids(2, 12)
    decoder = make_decoder(model, "auto")
    assert isinstance(decoder, Decoder)
    decoder.load(model(tokens[:, :4])[1])
    found = torch.stack([decoder.step(token) for token in tokens[:, 4:].unbind(1)], 1)
    want, cache = model(tokens)
    close(found, want[:, 4:])
    check(1e-5, flat(decoder.cache()), flat(cache))


needs_kernels = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))


@needs_kernels
@every
def test_one_call_per_token(name):
    check_one_call_per_token(make(name))


@needs_kernels
@pytest.mark.parametrize("name", KINDS)
def test_models_of_transformers(name, tmp_path):
    """They decode in one call per token, and train."""
    theirs(name).save_pretrained(tmp_path)
    model = load(tmp_path)
    check_one_call_per_token(model)
    model.train()
    model(ids(2, 12))[0].square().mean().backward()
    assert not [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@every
def test_segments(name):
    model = make(name, torch.float64)
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    want = with_gradients(model.backbone, lambda stack, x: stack(x)[0], x)
    found = with_gradients(model.backbone, lambda stack, x: run_in_segments(stack, x, segment_len=4)[0], x)
    check(1e-10, found, want)


@every
@torch.no_grad()
def test_stored_and_taken_back(name, tmp_path):
    model, tokens = make(name), ids(2, 16)
    _, cache = model(tokens[:, :10])
    caches.save(cache, tmp_path / "cache")
    again = caches.load(tmp_path / "cache")
    assert all(torch.equal(t, flat(cache)[key]) for key, t in flat(again).items())
    assert flat(again).keys() == flat(cache).keys()
    want = model(tokens[:, 10:], cache)[0]
    assert torch.equal(model(tokens[:, 10:], again)[0], want)
    history = caches.History(8)
    history.push(cache)
    for token in tokens[:, 10:].unbind(1):
        _, cache = model.step(token, cache)
        history.push(cache)
    assert torch.equal(model(tokens[:, 10:], history.rollback(6))[0], want)
    swapped = caches.select(caches.concat([again, again]), [3, 0])
    close(model(tokens[:, 10:].flip(0), swapped)[0].flip(0), want)


@every
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled(name, plain_empty):
    torch._dynamo.reset()
    model, tokens = make(name), ids(2, 9)
    # The same graphs as Inductor's, without compiling C++.
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        want, cache = model(tokens)
        logits, after = compiled(tokens)
        close(logits, want)
        check(1e-5, flat(after), flat(cache))
        close(compiled(tokens[:, :1], after)[0], model(tokens[:, :1], cache)[0])
    gradients = []
    for called in (compiled, model):
        model.zero_grad()
        called(tokens)[0].square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    check(1e-4, *gradients)


@pytest.fixture
def plain_empty():
    """Compilers and exporters do not know the filling of `empty`."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True)


@every
def test_what_cannot_be_exported(name):
    """Models without attention can, in test_export.py."""
    growing = {"dense": "layer1", "experts": "layer1", "parallel": "layer0"}[name]
    with pytest.raises(ValueError, match=f"the keys and values of {growing} grow with the text.*without attention"):
        export_step(make(name))


@every
def test_inside_of_transformers(name, tmp_path):
    model = make(name)
    mk.save_model(model, tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(loaded, MambakitForCausalLM)
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    found = loaded.generate(tokens, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert found[:, longest:].tolist() == [greedy(model, prompt, 9) for prompt in PROMPTS]
    loaded.train()
    loaded(tokens, attention_mask=mask, labels=tokens).loss.backward()
    loaded.save_pretrained(tmp_path / "again")
    assert mk.load_model(tmp_path / "again").config == model.config


class TestCommands:
    def test_generate(self, tmp_path, capsys):
        mk.save_model(make("experts", vocab_size=257), tmp_path)
        Bytes().save(tmp_path)
        assert main(["generate", str(tmp_path), "--prompt=def", "--max-new-tokens=5", "--temperature=0"]) == 0
        assert capsys.readouterr().out

    @pytest.mark.parametrize("kind", HUB)
    def test_convert(self, kind, tmp_path):
        theirs(kind).save_pretrained(tmp_path / "theirs")
        chosen = ["--dt-limit", "0.001", "inf"] if kind == "nemotron_h" else []
        assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "own"), "--format=mambakit", *chosen]) == 0
        assert main(["convert", str(tmp_path / "own"), str(tmp_path / "back"), "--format=hf"]) == 0
        assert load(tmp_path / "own").config == load(tmp_path / "theirs").config
        assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == kind
        want = load(tmp_path / "theirs").state_dict()
        assert all(torch.equal(t, want[n]) for n, t in load(tmp_path / "back").state_dict().items())

    @needs_kernels
    def test_doctor_checks_a_hybrid(self):
        found = {what: measure for what, measure, _ in checks_of("cpu", torch.float32, 1e-5, 1e-4)}
        for what in ("hybrid, forward = step", "hybrid, a model's token in one call"):
            path = mk.SsdPath(backend="cpu")
            assert found[what](path, torch.device("cpu"), torch.float32) < 1e-5

    def test_bench(self, capsys):
        sizes = ["--d-model=32", "--tokens=20", "--per-head-dim=8", "--state-rank=8", "--repeats=1", "--vocabulary=50"]
        assert main(["bench", "--what=model", "--layers=M2+E A M3|A", "--backends=auto", *sizes]) == 0
        assert "model of the layers M2+E A M3|A" in capsys.readouterr().out
        assert main(["bench", "--layers=M2 A", *sizes]) == 2
        assert "add --what model" in capsys.readouterr().err
        assert main(["bench", "--what=model", "--layers=M2 X", *sizes]) == 2
        assert "at 'X'" in capsys.readouterr().err
