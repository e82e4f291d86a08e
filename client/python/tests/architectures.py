# SPDX-License-Identifier: MIT
"""Architectures of transformers with small random weights, judged against their own eager attention.

    python architectures.py             what becomes of each, and why
    python architectures.py NAME ...    of these
    python architectures.py --write     the same into client/docs/python-transformers.md

An architecture is right where its results are eager's in every case that it takes: forward and gradients with padding on either
side, with a hole in the mask, packed by position_ids, generation with growing and static caches.
"""
from __future__ import annotations

import contextlib
import copy
import pathlib
import signal
import sys
import warnings

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

import fmha
import fmha.torch
from fmha import _transformers

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/python-transformers.md"
BEGIN, END = "<!-- made by client/python/tests/architectures.py --write -->\n", "<!-- end -->\n"
SECONDS = 20  # for one architecture
MOST_PARAMETERS = 3_000_000
ROWS = 19
ATOL, RTOL = 2e-3, 2e-3
GRADIENT_OFF = 0.01  # of its norm

SMALL = dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "encoder_embed_dim", "word_embed_proj_dim"), 64)
SMALL |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "ffn_hidden_size", "encoder_ffn_dim",
                        "decoder_ffn_dim", "intermediate_size_mlp"), 96)
SMALL |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                        "num_decoder_layers"), 2)
SMALL |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                        "decoder_attention_heads", "num_local_experts", "num_experts", "n_routed_experts"), 4)
SMALL |= dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions",
                        "max_target_positions"), 128)
SMALL |= dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 16)
SMALL |= dict(num_key_value_heads=2, num_kv_heads=2, rotary_dim=8, vocab_size=64, moe_intermediate_size=32,
              shared_expert_intermediate_size=32, num_experts_per_tok=2, sliding_window=8, local_attention=8, attention_chunk_size=8,
              pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, qk_rope_head_dim=8, qk_nope_head_dim=8,
              n_group=1, topk_group=1, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=8, image_size=32,
              patch_size=8, type_vocab_size=2, projection_dim=32)
_WIDE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
_CLIP = dict(text_config={**_WIDE, "vocab_size": 64, "max_position_embeddings": 128, "eos_token_id": 63},
             vision_config={**_WIDE, "image_size": 32, "patch_size": 8})
_GEMMA = dict(_WIDE, num_key_value_heads=2, head_dim=16, vocab_size=64, sliding_window=8, pad_token_id=0)
# What SMALL does not fit; None: leave the configuration's own.
SPECIAL = {
    "falcon": dict(head_dim=None, num_kv_heads=None), "clip": _CLIP, "siglip": _CLIP, "siglip2": _CLIP, "metaclip_2": _CLIP,
    "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8),
    "esmc": dict(num_key_value_heads=4), "zaya": dict(num_experts_per_tok=1),
    "t5gemma": dict(encoder=_GEMMA, decoder=dict(_GEMMA, cross_attention_hidden_size=64)),
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"]),
    "modernbert": dict(global_attn_every_n_layers=2),
    "llama4_text": dict(layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], interleave_moe_layer_step=1),
}
TASKS = {
    "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "vision": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "vision and text": {"clip": "CLIPModel", "siglip": "SiglipModel"},
}
# Those that the first task's mapping lists as what they are not.
NOT_DECODERS = frozenset(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) | frozenset(TASKS["encoder-decoder"])


class Unable(Exception):
    """This transformers, or this file, cannot run the architecture's own eager attention here."""


class Wrong(Exception):
    """The results differ from eager's."""


def architectures():
    """(task, model type) of all, in order."""
    found = [(task, name) for task, names in TASKS.items() for name in names if task != "decoder" or name not in NOT_DECODERS]
    return sorted(found, key=lambda pair: (list(TASKS).index(pair[0]), pair[1]))


def configuration(name, **more):
    made = configuration_auto.CONFIG_MAPPING[name]
    with contextlib.suppress(Exception):
        if made().sub_configs and name not in SPECIAL:
            raise Unable("a model of several")
    base = made()
    said = {k: v for k, v in SMALL.items() if hasattr(base, k)}
    if "qk_rope_head_dim" in said:  # heads of a latent, each with its own key
        said.pop("head_dim", None)
        said |= {n: 4 for n in ("num_key_value_heads",) if n in said}
    said |= SPECIAL.get(name, {}) | more
    config = made(**{k: v for k, v in said.items() if v is not None or k in ("eos_token_id",)})
    for key in ("attention_dropout", "dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if isinstance(getattr(config, key, None), float):
            setattr(config, key, 0.0)
    return config


def model_pair(task, name, **more):
    """(by fmhad, eager) with the same weights. @more: of the configuration."""
    kind = TASKS[task][name]
    kind = getattr(transformers, kind if isinstance(kind, str) else kind[0])
    try:
        config = configuration(name, **more)
        with torch.device("meta"):
            n = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        if n > MOST_PARAMETERS:
            raise Unable(f"{n / 1e6:.0f} million parameters")
        torch.manual_seed(1)
        eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32).eval()
        for parameter in eager.parameters():  # of a size at which attention matters, biases and sinks too
            if parameter.is_floating_point():
                torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    except Unable:
        raise
    except Exception as error:
        raise Unable(told(error)) from error
    mine = kind._from_config(copy.deepcopy(config), attn_implementation="fmhad", dtype=torch.float32).eval()
    mine.load_state_dict(eager.state_dict())
    return mine, eager


def told(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


def tokens(seed, batch=3, rows=ROWS):
    return torch.randint(4, 60, (batch, rows), generator=torch.Generator().manual_seed(seed))


def padded(side):
    seen = torch.ones(3, ROWS, dtype=torch.int64)
    if side == "left":
        seen[0, :6] = seen[2, :1] = 0
    elif side == "right":
        seen[0, -6:] = seen[2, -1:] = 0
    elif side == "hole":
        seen[0, 4:9] = seen[1, 11] = 0
    return seen


def cases(task):
    """(what, how it is called, of the first output which places count or None: all)."""
    if task == "decoder":
        plain = [("plain", {}), *((s, {"attention_mask": padded(s)}) for s in ("left", "right", "hole"))]
        for what, said in plain:
            yield what, {"input_ids": tokens(2), "use_cache": False, **said}, said.get("attention_mask")
        at = torch.cat([torch.arange(n) for n in (7, 3, 9)])[None]
        yield "packed", {"input_ids": tokens(3, 1), "position_ids": at, "use_cache": False}, None
        later = padded("left")
        yield "cached prompt", {"input_ids": tokens(4), "attention_mask": later, "use_cache": True}, later
    elif task == "encoder":
        for what in ("plain", "right", "left", "hole"):
            seen = padded(what)
            yield what, {"input_ids": tokens(2), "attention_mask": seen}, seen
        yield "no mask", {"input_ids": tokens(2)}, None
    elif task == "encoder-decoder":
        for what, rows in (("plain", 5), ("right", ROWS), ("hole", 30)):
            yield what, {"input_ids": tokens(2), "attention_mask": padded(what), "decoder_input_ids": tokens(3, 3, rows)}, None
        seen = padded("right")
        yield "decoder padded", {"input_ids": tokens(2), "decoder_input_ids": tokens(3), "decoder_attention_mask": seen}, seen
    elif task == "vision":
        yield "image", {}, None
    elif task == "vision and text":
        yield "image and text", {"input_ids": tokens(2), "attention_mask": padded("right")}, None
    elif task == "speech":
        yield "sound", {"decoder_input_ids": tokens(3, 3, 7)}, None


def with_media(task, model, said):
    generator = torch.Generator().manual_seed(5)
    config = model.config
    if task in ("vision", "vision and text"):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        said = {**said, "pixel_values": torch.randn(3, getattr(vision, "num_channels", 3), height, width, generator=generator)}
    if task == "speech":
        if not hasattr(config, "num_mel_bins"):
            raise Unable("other inputs than mel features")
        frames = 2 * config.max_source_positions
        said = {**said, "input_features": torch.randn(3, config.num_mel_bins, frames, generator=generator)}
    return said


def first_output(out):
    for key in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(out, key, None) is not None:
            return getattr(out, key)
    raise Unable("no logits")


def close(what, found, want):
    if not torch.isfinite(want).all():
        raise Unable(f"{what}: eager is not finite")
    if found.shape != want.shape or not torch.allclose(found, want, atol=ATOL, rtol=RTOL):
        worst = (found - want).abs().max().item() if found.shape == want.shape else float("nan")
        raise Wrong(f"{what}: {worst:.2g} off, of {want.abs().max().item():.2g}")


def judge_forward(task, mine, eager, what, said, counts):
    """Logits and gradients of one call."""
    def run(model):
        model.zero_grad()
        out = first_output(model(**with_media(task, model, copy.deepcopy(said))))
        counted = out if counts is None or counts.shape != out.shape[:2] else out[counts.bool()]
        (counted * torch.linspace(-1, 1, counted.shape[-1])).sum().backward()
        return counted.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    try:
        want, want_grads = run(eager)
    except Unable:
        raise
    except Exception as error:
        raise Unable(f"{what}: {told(error)}") from error
    found, grads = run(mine)
    close(what, found, want)
    least = 1e-4 * torch.stack([g.norm() for g in want_grads.values()]).max()  # a bias of keys has a gradient of 0
    for name, grad in want_grads.items():
        # By norms: an activation at a kink may fall to either side.
        off = (grads.get(name, torch.zeros_like(grad)) - grad).norm() / grad.norm().clamp(min=least)
        if not off <= GRADIENT_OFF:
            raise Wrong(f"{what}, gradient of {name}: {off:.2g} of its norm off")


def judge_generation(task, mine, eager, cache):
    def run(model):
        said = {"input_ids": tokens(4, 2, 11), "attention_mask": torch.ones(2, 11, dtype=torch.int64)}
        said["attention_mask"][0, :3] = 0
        if task == "speech":
            said = {"decoder_input_ids": tokens(4, 3, 3), **with_media(task, model, {})}
        with torch.no_grad():
            out = model.generate(**said, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True,
                                 cache_implementation=cache, disable_compile=True)
        return torch.stack(out.logits)

    what = f"generation, {cache or 'own'} cache"
    try:
        want = run(eager)
    except Exception as error:
        raise Unable(f"{what}: {told(error)}") from error
    close(what, run(mine), want)


@contextlib.contextmanager
def counted():
    """How often fmhad was asked, as a list that grows."""
    from transformers import AttentionInterface

    calls = []

    def attention(*args, **said):
        calls.append(1)
        return _transformers.attention(*args, **said)

    AttentionInterface.register("fmhad", attention)
    try:
        yield calls
    finally:
        AttentionInterface.register("fmhad", _transformers.attention)


def judge(task, name):
    """(outcome, a sentence): "right", "own": right by an attention of the model's own, "refused", "wrong", or "unable"."""
    fmha.torch.enable_transformers()

    def late(*_):
        raise Unable(f"more than {SECONDS} s")

    before, unable, done = signal.signal(signal.SIGALRM, late), [], []
    signal.alarm(SECONDS)
    try:
        with counted() as calls, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine, eager = model_pair(task, name)
            runs = [lambda c=c: judge_forward(task, mine, eager, *c) for c in cases(task)]
            if task in ("decoder", "encoder-decoder", "speech") and hasattr(mine, "generate"):
                runs += [lambda c=c: judge_generation(task, mine, eager, c) for c in ("dynamic", "static")]
            for run in runs:
                try:
                    run()
                    done.append(1)
                except Unable as error:
                    unable.append(str(error))
            if not done:
                raise Unable(unable[0])
            return ("right" if calls else "own"), "; ".join(unable)
    except Unable as error:
        return "unable", str(error)
    except Wrong as error:
        return "wrong", str(error)
    except fmha.FmhaError as error:
        return "refused", str(error)
    except KeyError as error:
        if error.args != ("fmhad",):
            raise
        return "refused", "transformers has classes of its own for each attention of this model (KeyError: 'fmhad')"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def table(outcomes) -> str:
    """The page's part. @outcomes: {(task, name): (outcome, sentence)}."""
    lines = [f"With transformers {transformers.__version__}:", ""]
    for outcome, heading in (("right", "Right, by fmhad"), ("own", "Right, by the model's own attention: fmhad is never asked")):
        lines += [f"**{heading}.**"]
        for task in TASKS:
            names = [f"`{n}`" for (t, n), (o, _) in outcomes.items() if (t, o) == (task, outcome)]
            if names:
                lines += [f"- {task}: " + ", ".join(names)]
        lines += [""]
    lines += ["**Refused, with the sentence.**"]
    sentences: dict = {}
    for (task, name), (outcome, sentence) in outcomes.items():
        if outcome == "refused":
            sentences.setdefault((task, sentence), []).append(f"`{name}`")
    lines += [f"- {task}: {', '.join(names)}: {sentence}" for (task, sentence), names in sentences.items()]
    lines += ["", unjudged(len(outcomes) - sum(o in ("right", "own", "refused") for o, _ in outcomes.values()), len(outcomes))]
    return "\n".join(lines) + "\n"


def unjudged(n: int, of: int) -> str:
    return (f"**Not judged: {n} of {of}** pairs of a task and an architecture: no small one could be built, or none was done within "
            f"{SECONDS} s. `architectures.py NAME` says why. Of these nothing is known.")


def page_with(text: str) -> str:
    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:start] + text + page[end:]


def main():
    chosen = [a for a in sys.argv[1:] if not a.startswith("-")]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # small models
    fmha.start(config={"devices": [{"backend": "cpu", "threads": 2}]})
    outcomes = {}
    for task, name in architectures():
        if chosen and name not in chosen:
            continue
        try:
            outcomes[task, name] = judge(task, name)
        except Exception as error:
            if chosen:
                raise
            outcomes[task, name] = "raised", told(error)
        print(f"{outcomes[task, name][0]:8} {task} {name}: {outcomes[task, name][1]}", flush=True)
    if "--write" in sys.argv:
        PAGE.write_text(page_with(table(outcomes)))
    return any(o in ("wrong", "raised") for o, _ in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
