# SPDX-License-Identifier: MIT
"""fmhad as a backend of diffusers' dispatcher: small random models beside torch's own attention, values and gradients."""
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
import fmha.torch  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from fmha import _run  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    torch.manual_seed(0)
    fmha.torch.enable_diffusers()


@pytest.fixture
def asked(monkeypatch):
    calls, own = [], _run.execute
    monkeypatch.setattr(_run, "execute", lambda tensors, options, *a, **w: calls.append(options.op) or own(tensors, options, *a, **w))
    return calls


def _flux():
    model = diffusers.FluxTransformer2DModel(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
                                             num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
                                             axes_dims_rope=[4, 4, 8])
    return model, dict(hidden_states=torch.randn(2, 16, 4), encoder_hidden_states=torch.randn(2, 24, 32),
                       pooled_projections=torch.randn(2, 32), timestep=torch.tensor([1.0, 0.5]), img_ids=torch.randn(16, 3),
                       txt_ids=torch.randn(24, 3))


def _wan():
    model = diffusers.WanTransformer3DModel(patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
                                            out_channels=4, text_dim=16, freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True,
                                            qk_norm="rms_norm_across_heads", rope_max_seq_len=32)
    return model, dict(hidden_states=torch.randn(2, 4, 2, 16, 16), timestep=torch.tensor([3, 7]),
                       encoder_hidden_states=torch.randn(2, 12, 16))


def _ltx():
    """Its text is padded: the mask is additive."""
    model = diffusers.LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8,
                                                 cross_attention_dim=32, num_layers=1, caption_channels=16)
    seen = torch.ones(2, 16, dtype=torch.bool)
    seen[0, 9:] = False
    return model, dict(hidden_states=torch.randn(2, 2 * 8 * 8, 4), encoder_hidden_states=torch.randn(2, 16, 16),
                       timestep=torch.tensor([1, 5]), encoder_attention_mask=seen, num_frames=2, height=8, width=8)


def _gradients(model, said):
    model.zero_grad()
    out = model(**said, return_dict=False)[0]
    out.square().sum().backward()
    return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [_flux, _wan, _ltx], ids=lambda make: make.__name__[1:])
def test_a_model_gives_what_it_gives_by_torch(make, asked):
    model, said = make()
    model.set_attention_backend("native")
    want, want_gradients = _gradients(model, said)
    assert not asked
    model.set_attention_backend("fmhad")
    found, gradients = _gradients(model, said)
    assert asked.count("forward") >= 2 and asked.count("backward") == asked.count("forward")
    torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-4)
    assert len(gradients) == len(want_gradients) > 10
    for one, other in zip(gradients, want_gradients):
        torch.testing.assert_close(one, other, atol=1e-3 * max(1, float(other.abs().max())), rtol=1e-3)


@pytest.mark.parametrize("mask", ["none", "causal", "keys", "keys of a batch", "additive"])
def test_the_function_itself(mask, asked):
    q, k, v = torch.randn(2, 40, 4, 32), torch.randn(2, 56, 2, 32), torch.randn(2, 56, 2, 32)
    seen = torch.rand(2, 56) < 0.6
    attn_mask = {"keys": seen, "keys of a batch": seen[:, None, None], "additive": torch.randn(2, 1, 40, 56)}.get(mask)
    said = dict(attn_mask=attn_mask, is_causal=mask == "causal", enable_gqa=True)
    want = dispatch.dispatch_attention_fn(q, k, v, **said, backend="native")
    with dispatch.attention_backend("fmhad"):
        found = dispatch.dispatch_attention_fn(q, k, v, **said)
    assert asked == ["forward"] and found.shape == q.shape
    torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-5)


def test_what_is_not_there_is_refused():
    q = torch.randn(1, 8, 2, 16)
    with dispatch.attention_backend("fmhad"), pytest.raises(fmha.NotSupportedError, match="context parallelism"):
        dispatch.dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True})
    assert not dispatch._AttentionBackendRegistry._is_context_parallel_available(dispatch.AttentionBackendName("fmhad"))


def test_registering_again_changes_nothing():
    before, named = dict(dispatch._AttentionBackendRegistry._backends), dispatch.AttentionBackendName("fmhad")
    fmha.torch.enable_diffusers()
    assert dispatch._AttentionBackendRegistry._backends == before and dispatch.AttentionBackendName("fmhad") is named
