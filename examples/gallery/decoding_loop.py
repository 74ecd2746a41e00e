"""A decoding loop of one's own around `MambaLMHeadModel`, with `InferenceParams` carrying the states.

python -m mambakit.compat examples/gallery/decoding_loop.py
"""

# pyright: reportMissingImports=false
import tempfile

import torch
from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from mamba_ssm.utils.generation import InferenceParams


@torch.inference_mode()
def greedy(model, prompt, new_tokens):
    """The prompt in one call, then token by token; every layer updates its states in place."""
    batch, length = prompt.shape
    params = InferenceParams(max_seqlen=length + new_tokens, max_batch_size=batch)
    params.key_value_memory_dict = model.allocate_inference_cache(batch, length + new_tokens)
    ids, new = [prompt], prompt
    for _ in range(new_tokens):
        logits = model(new, inference_params=params, num_last_tokens=1).logits[:, -1]
        params.seqlen_offset += new.shape[1]
        new = logits.argmax(dim=-1, keepdim=True)
        ids.append(new)
    return torch.cat(ids, dim=1)


@torch.inference_mode()
def greedy_without_states(model, ids, new_tokens):
    for _ in range(new_tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids


def compare(layer, options, prompt):
    config = MambaConfig(d_model=64, n_layer=3, vocab_size=200, ssm_cfg={"layer": layer, **options})
    model = MambaLMHeadModel(config, device="cpu", dtype=torch.float32).eval()
    ids = greedy(model, prompt, 16)
    assert torch.equal(ids, greedy_without_states(model, prompt, 16))
    assert torch.equal(ids, model.generate(prompt, max_length=28, top_k=1))
    sampling = {"top_k": 20, "top_p": 0.9, "temperature": 0.8}
    output = model.generate(prompt, 28, **sampling, return_dict_in_generate=True, output_scores=True)
    print(f"{layer}: {ids[0, 12:].tolist()}, and {len(output.scores)} steps sampled")
    return model, ids


if __name__ == "__main__":
    torch.manual_seed(0)
    prompt = torch.randint(200, (2, 12))
    compare("Mamba1", {"d_state": 8}, prompt)
    compare("Mamba3", {"d_state": 16, "headdim": 16}, prompt)
    model, ids = compare("Mamba2", {"d_state": 16, "headdim": 16}, prompt)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        again = MambaLMHeadModel.from_pretrained(directory, device="cpu", dtype=torch.float32)
        assert torch.equal(again.generate(prompt, max_length=28), ids)
    print("saved, loaded, the same ids")
