# SPDX-License-Identifier: MIT
"""Models of transformers with random weights: fmhad against their own eager attention."""
import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import architectures  # noqa: E402
import fmha.torch  # noqa: E402
from fmha import _masks, _transformers  # noqa: E402
from test_torch import DEVICE  # noqa: E402
from transformers import masking_utils  # noqa: E402

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


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs take a bias there")
@pytest.mark.parametrize("task, name, more", [
    ("decoder", "llama4_text", {}), ("encoder", "modernbert", {}), ("decoder", "gemma3_text", {}),
    ("decoder", "gemma3_text", dict(use_bidirectional_attention=True)),
])
def test_masks_that_are_no_band_go_as_data(task, name, more, monkeypatch):
    """Chunks, windows over holes in the padding, rows that look both ways: no bias of rows by keys is made of them."""
    fmha.torch.enable_transformers()
    try:
        mine, eager = architectures.model_pair(task, name, **more)
    except architectures.Unable as error:
        pytest.skip(str(error))
    kinds = []
    monkeypatch.setattr(_transformers, "_dense", lambda *_: pytest.fail("the mask became a bias"))
    kept = _masks.Mask.form
    monkeypatch.setattr(_masks.Mask, "form", lambda self: kinds.append(type(kept(self)).__name__) or kept(self))
    for what in ("plain", "hole"):
        seen = architectures.padded(what)
        said = {"input_ids": architectures.tokens(2), "attention_mask": seen}
        with torch.no_grad():
            found, want = (architectures.first_output(m(**said))[seen.bool()] for m in (mine, eager))
        torch.testing.assert_close(found, want, atol=2e-3, rtol=2e-3)
    assert "IntervalMask" in kinds


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # gpt_oss lists the names with "flash" that it takes
def test_continuous_batching(name, monkeypatch):
    """Requests of different lengths in one batch, over a paged cache; sliding windows have their own pages."""
    mine, eager = models(name)
    if not hasattr(mine, "generate_batch"):
        pytest.skip("this transformers has no continuous batching")
    mine.set_attn_implementation("flash_fmhad")
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in (5, 21, 9, 30)]
    words = transformers.GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    asked, own = [], fmha.torch.attention
    monkeypatch.setattr(fmha.torch._functions, "attention", lambda *a, **w: asked.append(w) or own(*a, **w))
    found = mine.generate_batch(inputs=prompts, generation_config=words, progress_bar=False)
    assert len(asked) >= 2 * 10 and all(w.get("cu_seqlens_q") is not None for w in asked)
    for prompt, output in zip(prompts, found.values(), strict=True):
        assert not output.error, output.error
        tokens = torch.tensor([prompt], device=DEVICE)
        want = eager.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=words)
        assert output.generated_tokens == want[0, len(prompt) :].tolist()


def test_the_name_with_flash_serves_ordinary_generation_too():
    mine, eager = models("gemma2")
    mine.set_attn_implementation("flash_fmhad")
    tokens = torch.randint(1, 64, (2, 11), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    seen = torch.ones_like(tokens)
    seen[0, :3] = 0
    for cache in ("dynamic", "static"):
        a, b = (m.generate(tokens, attention_mask=seen, max_new_tokens=12, do_sample=False, cache_implementation=cache, disable_compile=True)
                for m in (mine, eager))
        assert torch.equal(a, b)


# ---- all architectures: architectures.py ----

# One of each kind of mask, cache and layer. The others with FMHA_TEST_ALL=1: minutes.
CHOSEN = [("decoder", n) for n in (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gpt2 gpt_neox gptj opt phi phi3 bloom mpt falcon llama4_text cohere cohere2 olmo2 "
    "granite mixtral gpt_oss starcoder2 stablelm smollm3 deepseek_v3 deepseek_v32 bitnet").split()]
CHOSEN += [("encoder", n) for n in "bert roberta distilbert modernbert mpnet".split()]
CHOSEN += [("encoder-decoder", n) for n in "bart mbart marian pegasus m2m_100 t5 t5gemma".split()]
CHOSEN += [("speech", "whisper"), ("vision", "vit"), ("vision and text", "clip"), ("vision and text", "siglip")]


def on_the_page():
    """{(task, name): outcome} that the page says, for this version of transformers; None: it is of another one."""
    page = architectures.PAGE.read_text()
    made = page[page.index(architectures.BEGIN) : page.index(architectures.END)]
    if f"With transformers {transformers.__version__}:" not in made:
        return None
    found, outcome = {}, None
    headings = {"**Right, by fmhad": "right", "**Right, by the model's": "own", "**Refused": "refused"}
    for line in made.splitlines():
        outcome = next((o for h, o in headings.items() if line.startswith(h)), outcome)
        if line.startswith("- "):
            task, names = line[2:].split(": ", 1)
            found |= {(task, n.strip("`")): outcome for n in names.split(": ")[0].split(", ") if n.startswith("`")}
    return found


@pytest.mark.parametrize("task, name", architectures.architectures() if os.environ.get("FMHA_TEST_ALL") else CHOSEN)
def test_an_architecture_is_right_or_refused(task, name):
    if DEVICE != "cpu":
        pytest.skip("judged on the CPU")
    outcome, sentence = architectures.judge(task, name)
    assert outcome in ("right", "own", "refused") or (outcome == "unable" and (task, name) not in CHOSEN), sentence
    said = on_the_page()
    if said is not None:
        assert said.get((task, name), "unable") == outcome, f"{architectures.PAGE} is stale: architectures.py --write ({sentence})"


def test_the_page_says_how_many_are_not_judged():
    found, pairs = on_the_page(), architectures.architectures()
    if found is None:
        pytest.skip("the page is of another version of transformers")
    assert architectures.unjudged(len(pairs) - len(found), len(pairs)) in architectures.PAGE.read_text()


def without(what):
    """attention() that leaves a part of the mask out."""
    right = _transformers.attention

    def attention(module, query, key, value, mask, **said):
        if what == "mask":
            mask = None
        elif isinstance(mask, _masks.Mask):
            kept = mask.kept
            changed = {"padding": dict(padding=None), "window": dict(band=kept.band._replace(left=None)),
                       "segments": dict(band=kept.band._replace(segments=None, remapped=False)), "cause": dict(band=_masks.Band())}[what]
            mask = _masks.Mask(_masks.dataclasses.replace(kept, **changed))
        return right(module, query, key, value, mask, **said)

    return attention


@pytest.mark.skipif(DEVICE != "cpu", reason="judged on the CPU")
@pytest.mark.parametrize("task, name, what", [
    ("decoder", "llama", "padding"), ("decoder", "llama", "segments"), ("decoder", "llama", "cause"), ("decoder", "mistral", "window"),
    ("encoder", "bert", "padding"), ("encoder", "bert", "mask"), ("encoder", "modernbert", "window"), ("encoder-decoder", "bart", "padding"),
    ("encoder-decoder", "bart", "cause"), ("decoder", "gemma3_text", "window"), ("encoder-decoder", "t5", "mask"),
])
def test_the_judge_sees_a_wrong_mask(task, name, what, monkeypatch):
    monkeypatch.setattr(architectures._transformers, "attention", without(what))
    assert architectures.judge(task, name)[0] == "wrong"


# ---- masks alone ----

LATER = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]])


def packed(function, positions, segments):
    """What transformers makes of @function for packed sequences: one function of its own before 5.24, two since; older ones leave
    positions as they are."""
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(function, positions, segments)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        function = masking_utils.remap_positions_for_packed_sequence(function, positions)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(segments))


FUNCTIONS = {
    "causal": masking_utils.causal_mask_function, "all": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "packed": packed(
        masking_utils.sliding_window_causal_mask_function(3), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]]).expand(2, -1), LATER.expand(2, -1)),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
    "either": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4)),
    "someone's": lambda b, h, q, k: (q - k) % 3 == 0,
}
PADDINGS = {
    "none": None, "all": torch.ones(2, 9, dtype=torch.bool), "left": torch.tensor([[0] * 4 + [1] * 5, [1] * 9]).bool(),
    "right": torch.tensor([[1] * 6 + [0] * 3, [1] * 9]).bool(), "hole": torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 1], [1] * 9]).bool(),
    "nothing": torch.tensor([[0] * 9, [1] * 9]).bool(), "short": torch.tensor([[0] + [1] * 5, [1] * 6]).bool(),
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_mask_is_what_its_function_says(function, padding):
    """Every function, padding, offset and number of rows: the attention of transformers' own tensor."""
    fmha.torch.enable_transformers()
    if DEVICE != "cpu":
        pytest.skip("the functions hold tensors of the CPU")
    generator = torch.Generator().manual_seed(7)
    for rows, keys, q_offset, kv_offset in ((9, 9, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (2, 9, 3, 0), (5, 9, 0, 0), (1, 5, 8, 4), (3, 5, 6, 4), (9, 6, 0, 0)):
        said = dict(batch_size=2, q_length=rows, kv_length=keys, q_offset=q_offset, kv_offset=kv_offset, mask_function=FUNCTIONS[function],
                    attention_mask=PADDINGS[padding], dtype=torch.float32, device=torch.device("cpu"))
        if function == "packed" and (padding != "none" or (rows, keys) != (9, 9)):
            continue  # transformers says so of itself
        q, k, v = (torch.randn(2, 4, n, 16, generator=generator) for n in (rows, keys, keys))
        mask = _masks.mask(**said)
        seen = masking_utils.sdpa_mask(**said, allow_is_causal_skip=False)
        seen = seen.expand(2, 1, rows, keys)
        found = _transformers.attention(None, q, k, v, mask, is_causal=True)[0]
        scores = (q @ k.mT / 4).masked_fill(~seen, float("-inf"))
        want = (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)
        counts = seen.any(-1)[:, 0]  # a row that sees nothing: eager averages, here it is 0
        if PADDINGS[padding] is not None and function not in ("all", "both sides") and q_offset == 0:
            kept = torch.nn.functional.pad(PADDINGS[padding], (0, 9))[:, :rows]
            counts = counts & (kept | kept.flip(-1).cumsum(-1).flip(-1).bool())  # rows that are padding at the end are left out
        torch.testing.assert_close(found[counts], want[counts], atol=1e-5, rtol=1e-4, msg=lambda m: f"{rows, keys, q_offset}: {m}")
        if isinstance(mask, _masks.Mask):
            assert torch.equal(mask == 0, seen) and torch.equal((mask[..., :3] + 1).detach(), mask.dense()[..., :3] + 1)


def test_a_mask_that_was_written_to_counts_as_it_is():
    fmha.torch.enable_transformers()
    q, k, v = (torch.randn(1, 2, 5, 16, device=DEVICE) for _ in range(3))
    for change in (lambda m: m[..., 2].fill_(-1e30), lambda m: m.masked_fill_(torch.eye(5, device=DEVICE).bool(), -1e30)):
        mask = _masks.mask(1, 5, 5, mask_function=masking_utils.causal_mask_function, device=torch.device(DEVICE))
        found = _transformers.attention(None, q, k, v, mask)[0]
        change(mask)
        dense = mask.dense().clone()
        changed = _transformers.attention(None, q, k, v, mask)[0]
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense).transpose(1, 2)
        assert not torch.allclose(found[:, 2:], changed[:, 2:])
        torch.testing.assert_close(changed[:, 1:], want[:, 1:], atol=1e-3, rtol=1e-3)


def test_what_is_not_done_is_refused():
    q = torch.randn(1, 2, 5, 16, device=DEVICE)
    for name, value in (("indices", q), ("block_indices", q), ("cache", object()), ("sinks", q), ("output_attentions", True)):
        with pytest.raises(fmha.NotSupportedError, match=name):
            _transformers.attention(None, q, q, q, None, **{name: value})
    with pytest.raises(fmha.NotSupportedError, match="attention_mask"):
        _transformers.attention(None, q, q, q, torch.ones(1, 5, device=DEVICE))
