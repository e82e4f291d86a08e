# SPDX-License-Identifier: MIT
"""Models of transformers with random weights: fmhad against their own eager attention."""
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import fmha.torch  # noqa: E402
from test_torch import DEVICE  # noqa: E402

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
             head_dim=32, max_position_embeddings=128, pad_token_id=0)


def models(name):
    """The same weights twice: (fmhad's, eager)."""
    fmha.torch.enable_transformers()
    if name == "llama":
        config = transformers.LlamaConfig(**SIZES)
    elif name == "gemma2":
        config = transformers.Gemma2Config(**SIZES, sliding_window=8, attn_logit_softcapping=20.0, query_pre_attn_scalar=32)
    else:
        config = transformers.GptOssConfig(**SIZES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1)
    torch.manual_seed(1)
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(DEVICE).eval()
    if name == "gptoss":
        for layer in eager.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    mine = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="fmhad").to(DEVICE).eval()
    mine.load_state_dict(eager.state_dict())
    return mine, eager


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptoss"])
def test_logits_and_gradients(name):
    mine, eager = models(name)
    tokens = torch.randint(1, 64, (2, 21), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    losses = []
    for model in (mine, eager):
        out = model(tokens, labels=tokens)
        out.loss.backward()
        losses.append(out)
    torch.testing.assert_close(losses[0].logits, losses[1].logits, atol=1e-3, rtol=1e-3)
    for (which, a), (_, b) in zip(mine.named_parameters(), eager.named_parameters()):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=2e-3, rtol=2e-2, msg=lambda m, which=which: f"{which}: {m}")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptoss"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(name, side):
    mine, eager = models(name)
    tokens = torch.randint(1, 64, (3, 17), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    seen = torch.ones_like(tokens)
    for row, n in ((0, 6), (2, 1)):
        seen[row, slice(0, n) if side == "left" else slice(17 - n, 17)] = 0
    with torch.no_grad():
        a, b = (m(tokens, attention_mask=seen).logits for m in (mine, eager))
    torch.testing.assert_close(a[seen.bool()], b[seen.bool()], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptoss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache):
    mine, eager = models(name)
    tokens = torch.randint(1, 64, (2, 11), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    seen = torch.ones_like(tokens)
    seen[0, :3] = 0
    a, b = (m.generate(tokens, attention_mask=seen, max_new_tokens=12, do_sample=False, cache_implementation=cache,
                       output_logits=True, return_dict_in_generate=True, disable_compile=True) for m in (mine, eager))
    assert torch.equal(a.sequences, b.sequences)
    torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), atol=2e-3, rtol=2e-3)
