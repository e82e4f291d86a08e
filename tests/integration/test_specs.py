# SPDX-License-Identifier: MIT
"""
The kernel space from the outside: fmhactl enumerate, validate, archs and profiles, with no daemon.

The figures are those of AMD's dispatcher. Small parts of the space are built a second time here, by
brute force and from the description of the rules alone, so that a mistake in the rules files and one in
the library would have to agree.
"""
import itertools
import json
import os
import pathlib
import re
import subprocess

import jsonschema
import pytest
import shapes

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("FMHA_BUILD", ROOT / "build/release"))
FMHACTL = BUILD / "client/ctl/fmhactl"
SPECS = ROOT / "specs"

ROWS = [
    ("gfx950", "receipt0_fwd", 864300, "d03af02e189ad863cd837e98e4bf529382bc6c97d78f0d123f2eed416597862f"),
    ("gfx950", "splitkv", 620010, "dd93cd0fd16c1aa973897a13a18def690baaac6cd67c8d8a54d0ea7c4c099423"),
    ("gfx950", "pagedkv", 245952, "b1902bf16e3db2ddb5073b6befcf11e1f139dd8fb51b7f622f85e9a352666341"),
    ("gfx950", "appendkv", 220, "eb99fe53c5b33112d893b46f0897d65cb0bac7fcbeb82228372a93772ce0c090"),
    ("gfx950", "batch_prefill", 1055120, "8aebc3c8fbdee913d5d2d5e0e35c2977eb8040cac9a12173cb85c24cda700888"),
    ("gfx950", "bwd", 12192, "2c27dc169e238b4bec0d3f9d5bbf67ad50a6af9fb47f68e21b599d536bfd12e2"),
    ("gfx950", "fwd", 236800, "b627e42318e6ab25cc36c6691d3e4fc7e51b5dccae1ca9d50018247b4be09635"),
    ("gfx950", "fwd_ci", 1860, "98a6019bfe3a59bee78898cc32a297d9c83a99208ea647193dbde9cb3b5b391f"),
    ("gfx942", "receipt0_fwd", 1062588, "e62569e9de5b4c1bbe7bbb9e76b6ee342440adfeefba193fc61a4f4a9719750d"),
    ("gfx942", "splitkv", 620010, "b5692d205628238c29b89da6e85828d19369493390e09c5980497fefd85e9546"),
    ("gfx942", "pagedkv", 245952, "cddfe2177eb1f57ea50d93c4921a6a749ba0db450644b4f7c5b04d9ea9ba6646"),
    ("gfx942", "appendkv", 220, "ce82c3d1e88dbc09f06dc2a87c991793ffe753697039bb0867191834cbafba5f"),
    ("gfx942", "batch_prefill", 1055120, "9910b214e7679c1d3bff6ddc6ba67567eb9485409aa21a3f23a045916b4511dd"),
    ("gfx942", "bwd", 12192, "dbb2666467853cc4c2c1f94f89f44aa9219739ea5e9ef98875eecdb668958186"),
    ("gfx942", "fwd", 332032, "47b25009b5ca1af1877577482786b09c991d3ec2602de4f252e4c14452dd3cc1"),
    ("gfx942", "fwd_ci", 2852, "381bc1399af72a5367229b1cbd6361c75ec8fcb33aaaa0dc0587fa9b222fdd8c"),
    ("gfx1100", "receipt0_fwd", 1338048, "8fc2f5ad0f55a22b45da8f071cb05e1fb4b5e492c83fac6f34f7de664dd8cf8b"),
    ("gfx1100", "splitkv", 607992, "9ce6f8c5b27ffbb5c3d511ce9fc73f88b489bc48894afeeff0532bb06ae77150"),
    ("gfx1100", "pagedkv", 227952, "f0dcb84ff140666118feb86169c6302ad7d1d3086c3470e1087a260d80fe9522"),
    ("gfx1100", "appendkv", 216, "bf66100fdb18afc253219474e2bde072783435a0fc1f69e84a0da3f0bc2aa1c5"),
    ("gfx1100", "batch_prefill", 1013120, "cdf73e3e8b5bb0a264ade8ddc0540a1bcc712070e69f6962f223571735f8ae8a"),
    ("gfx1100", "bwd", 12192, "8a9e337fd27c0614947a691b7ecf7032d10341bc1f41f31d9458d055d501dbe8"),
    ("gfx1100", "fwd", 447360, "dc144133e9156431ecb130d11bcf20fa254e73ec7382f628f244fed3addcefcd"),
    ("gfx1100", "fwd_ci", 3500, "52078abd95dbc4676bd608a89bca94ed5c6f1000421bd226afe5e7140b9bbf44"),
]

HEADER = (
    "family,data_type,mode,vlayout,hdim_q,hdim_v,gfx_arch,tile_m0,tile_n0,tile_k0,tile_n1,tile_k1,tile_k0max,"
    "tile_bwd6,tile_bwd7,tile_bwd8,wave_m0,wave_n0,wave_k0,wave_m1,wave_n1,wave_k1,wave_m2,wave_n2,wave_k2,"
    "warp_m0,warp_n0,warp_k0,warp_m1,warp_n1,warp_k1,warp_m2,warp_n2,warp_k2,pad_s,pad_sk,pad_d,pad_dv,"
    "pipeline,block_per_cu,num_wave_groups,mask,bias,lse,dropout,qscale,rope,logits,paged_kv,sink,"
    "skip_min_seqlen_q,page_size,kv_memory_layout,kv_lookup_table,deterministic,dbias,dropout_variant,"
    "tile_tag,use_trload"
)


def fmhactl(*args, code=0, text=None):
    # Nothing here may need a daemon.
    env = dict(os.environ, FMHAD_SOCKET="/nonexistent")
    done = subprocess.run([FMHACTL, *map(str, args)], input=text, capture_output=True, text=True, env=env)
    assert done.returncode == code, (args, done.stderr)
    return done.stdout if code == 0 else done.stdout + done.stderr


def enumerate_rows(*args):
    """Of AMD's space."""
    lines = fmhactl("enumerate", "--rules", "ck", *args).splitlines()
    assert lines[0] == HEADER
    return [dict(zip(HEADER.split(","), line.split(","))) for line in lines[1:]]


@pytest.mark.parametrize("arch,config,count,sha256", ROWS, ids=[f"{a}-{c}" for a, c, _, _ in ROWS])
def test_hash_of_sorted_rows(arch, config, count, sha256):
    pipeline = (
        f"'{FMHACTL}' enumerate --arch {arch} --config {config} 2>/dev/null | tail -n +2 | "
        "LC_ALL=C sort -S 400M --parallel=2 | tee >(wc -l >&2) | sha256sum"
    )
    done = subprocess.run(["bash", "-o", "pipefail", "-c", pipeline], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr) == count
    assert done.stdout.split()[0] == sha256


# ---- a second implementation of small parts -------------------------------------------------------

BM = (16, 32, 64, 128, 192, 256)
BN = (16, 32, 64, 96, 128, 192, 256, 384)
BK = (16, 32, 64, 96, 128, 256)


def forward_tile_fits(arch, dtype, hq, hv, pipe, bm, bn, bk, warp):
    """Section 4 of the description, line by line."""
    gfx9, gfx950 = arch.startswith("gfx9"), arch == "gfx950"
    es = {"fp16": 2, "bf16": 2, "fp32": 4}.get(dtype, 1)
    wm, wn, wk = warp
    if bk > hq or hq % bk or bm % wm or bn % wn or bk % wk:
        return False
    kv = (16 if gfx950 else 4) // es
    nw = bm // wm
    if pipe.startswith("qr_async"):
        banks = 64 if gfx950 else 32
        ppr = 4 * banks // es
        kp = 16 // es
        v = 32 // kp * (hv // (ppr // kp)) * (ppr + kp)
        lanes = bk // kv if kv else 1
        groups = 64 // lanes if lanes else 1
        issues = bn // (groups * nw) if groups * nw else 0
        k = issues * nw * (64 * kv + kp)
        if 3 * max(k, v) * es > 163840:
            return False
    elif (bm + bn) * bk * es > 65536:
        return False
    if pipe == "qr" and hq == 256 and gfx9:
        first = {"fp16": (32, 16), "bf16": (32, 16), "fp32": (16, 16)}.get(dtype, (32, 32))
        if (bn // wn) * (bk // wk) % 8 or (bn // first[0]) * (bk // first[1]) % 8:
            return False
    if pipe == "qr_async" and gfx9 and bn * bk % (nw * 64 * kv):
        return False
    if dtype != "fp32" and pipe in ("qr", "qr_async", "qs"):
        if (hq, hv) == (128, 128):
            if bn != 128 or (pipe == "qr_async" and bm != 128) or (pipe != "qr_async" and bk == 64):
                return False
        elif bm not in (64, 128, 192, 256):
            return False
    if gfx950 and pipe == "qr_async_trload":
        if (hq, hv) not in ((64, 64), (128, 128)) or ((hq, hv) == (128, 128) and bn == 128):
            return False
    if gfx950 and pipe == "qr_async_trload_v3" and bm != 256:
        return False
    return True


def forward_tiles(arch, dtype, hq, hv, pipe):
    warps = {"fp16": ((32, 32, 16), (16, 16, 32)), "bf16": ((32, 32, 16), (16, 16, 32)), "fp32": ((16, 16, 16),)}
    return {
        (bm, bn, bk, *warp)
        for bm, bn, bk in itertools.product(BM, BN, BK)
        for warp in warps.get(dtype, ((32, 32, 32),))
        if forward_tile_fits(arch, dtype, hq, hv, pipe, bm, bn, bk, warp)
    }


FORWARD_CASES = [
    ("gfx90a", "fp16", 96, 128, "qr_async", 0),
    ("gfx90a", "bf16", 256, 256, "qr", 0),
    ("gfx942", "bf16", 128, 128, "qr_async", 0),
    ("gfx942", "fp16", 160, 160, "qr", 0),
    ("gfx942", "fp8bf16", 64, 64, "qr", 0),
    ("gfx942", "fp32", 48, 48, "qr", 800),
    ("gfx950", "bf16", 192, 128, "qr_async", 0),
    ("gfx950", "fp16", 64, 64, "qr_async_trload", 0),
    ("gfx950", "fp16", 128, 128, "qr_async_trload", 0),
    ("gfx950", "bf16", 128, 128, "qr_async_trload_v3", 0),
    ("gfx950", "fp8bf16", 256, 256, "qr_async", 0),
    ("gfx1100", "fp16", 128, 128, "qr_async", 0),
    ("gfx1201", "fp8bf16", 192, 128, "qr_async", 0),
    ("gfx1201", "fp16", 80, 96, "qr_async", 0),
]


@pytest.mark.parametrize("arch,dtype,hq,hv,pipe,receipt", FORWARD_CASES)
def test_forward_tiles_by_brute_force(tmp_path, arch, dtype, hq, hv, pipe, receipt):
    config = tmp_path / "sweep.json"
    config.write_text(json.dumps({"variant": "fwd", "trait_config": {"data_type": {"values": [dtype]}}}))
    lines = fmhactl(
        "enumerate", "--arch", arch, "--config", config, "--receipt", receipt,
        "--filter", f"hdim_q == {hq} and hdim_v == {hv} and pipeline == '{pipe}'",
    ).splitlines()
    # The columns of the tile are 8 to 34 and 58 (its tag); the others are features.
    columns = HEADER.split(",")
    rows = [line.split(",") for line in lines[1:]]
    features = [(*row[:7], *row[34:57], row[58]) for row in rows]
    tiles = {(*row[7:34], row[57]) for row in rows}
    # Every tile comes with every combination of features, once.
    assert len(rows) == len(set(lines[1:])) == len(set(features)) * len(tiles)
    assert set(features) == forward_features(arch, dtype, hq, hv, pipe, receipt)
    named = [dict(zip(columns[7:34], tile), data_type=dtype, hdim_q=str(hq), hdim_v=str(hv)) for tile in tiles]
    assert {
        tuple(int(t[f]) for f in ("tile_m0", "tile_n0", "tile_k0", "warp_m0", "warp_n0", "warp_k0")) for t in named
    } == forward_tiles(arch, dtype, hq, hv, pipe)
    for tile in named:
        check_derived(tile)


def check_derived(row):
    n = {k: int(v) for k, v in row.items() if v.lstrip("-").isdigit()}
    k0max = {80: 96, 96: 128, 160: 256}.get(n["hdim_q"], n["hdim_q"])
    k1 = 32
    if "8" in row["data_type"]:
        k1 = n["tile_k0"]
    elif (n["tile_m0"], n["tile_n0"], n["tile_k0"], n["hdim_q"]) in (
        (128, 64, 32, 128), (32, 128, 32, 128), (32, 128, 16, 48)
    ):
        k1 = 16
    assert n["tile_k0max"] == k0max and n["tile_n1"] == n["hdim_v"] and n["tile_k1"] == k1
    assert n["wave_m0"] == n["wave_m1"] == n["tile_m0"] // n["warp_m0"]
    assert all(n[f] == 1 for f in ("wave_n0", "wave_k0", "wave_n1", "wave_k1", "wave_m2", "wave_n2", "wave_k2"))
    assert all(n[f"warp_{a}0"] == n[f"warp_{a}1"] for a in "mnk")
    assert (n["warp_m2"], n["warp_n2"], n["warp_k2"]) == (16, 16, 16)


def forward_features(arch, dtype, hq, hv, pipe, receipt):
    """All columns but the tile's, in order, as section 6 and the receipts of section 9 have them."""
    bools = (0, 1)
    found = set()
    masks = ("no", "top_left", "generic")
    if dtype in ("fp16", "bf16") and pipe in ("qr", "qr_async"):
        specs = [
            (cap, mask, bias, lse, drop, skip, sink, "no")
            for cap, mask, bias, lse, drop, skip, sink in itertools.product(
                bools, masks, ("no", "bias", "alibi"), bools, bools, bools, bools)
        ]
        if (hq, hv) == (256, 256):
            pads = lambda s: ("0000", "1100", "1111") if pipe == "qr" else ()
        else:
            pads = lambda s: ("0000", "1111") if s[2] == "bias" and pipe == "qr" else (
                ("1011", "1111") if s[2] != "bias" and pipe == "qr_async" else ())
    elif pipe == "qr_async_trload":
        specs = [(0, m, "no", l, 0, 0, s, "no") for m, l, s in itertools.product(masks, bools, bools)]
        pads = lambda s: ("0000", "0011")
    elif pipe == "qr_async_trload_v3":
        specs = [(c, m, "no", 0, 0, 0, 0, "no") for c, m in itertools.product(bools, masks[:2])]
        pads = lambda s: ("1100",)
    elif dtype == "fp32":
        specs = list(itertools.product(bools, masks, ("no", "bias", "alibi"), bools, bools, bools, bools, ("no",)))
        pads = lambda s: ("0000", "0100", "1111")
    else:
        specs = [
            (c, m, "no", 0, 0, 0, s, q)
            for c, q, m, s in itertools.product(bools, ("no", "pertensor", "blockscale"), masks, bools)
        ]
        pads = lambda s: ("1011", "1111") if (pipe == "qr") == (hq == 64) else ()
    for spec, mode in itertools.product(specs, ("batch", "group")):
        cap, mask, bias, lse, drop, skip, sink, qscale = spec
        if cap and bias != "no":
            continue
        if receipt == 800 and (skip or cap):
            continue
        for pad in pads(spec):
            if mode == "group" and pad[:2] != "11":
                continue
            found.add(tuple(map(str, (
                "fwd", dtype, mode, "r", hq, hv, arch, *pad, pipe, -1, 1, mask, bias, lse, drop, qscale, "none",
                cap, 0, sink, skip, 1, "vectorized", "sglang", 0, 0, "", 0,
            ))))
    return found


def test_split_tiles_by_brute_force():
    expected = {
        (bm, bn, bk)
        for bm, bn, bk in itertools.product(BM, BN, BK)
        if bk <= 80 and (bm + bn) * bk * 2 <= 65536
    }
    for arch in ("gfx90a", "gfx1201"):
        rows = enumerate_rows("--arch", arch, "--config", "pagedkv", "--filter", "hdim_q == 80 and data_type == 'bf16'")
        assert {tuple(int(r[f]) for f in ("tile_m0", "tile_n0", "tile_k0")) for r in rows} == expected
        assert len(rows) == len(expected) * 72
        assert all(r["tile_k1"] == "32" and r["paged_kv"] == "1" for r in rows)


def test_exhaustive_forward_by_brute_force(tmp_path):
    config = tmp_path / "sweep.json"
    config.write_text(json.dumps({
        "variant": "fwd",
        "trait_config": {
            "data_type": {"values": ["fp16"]}, "mode": {"values": ["group"]}, "mask": {"values": ["top_left"]},
            "lse": {"values": [True]}, "dropout": {"values": [False]},
        },
    }))
    rows = enumerate_rows("--arch", "gfx1100", "--config", config, "--mode", "exhaustive", "--hdims", "80x96")
    tiles = [
        (bm, bn, bk, warp)
        for bm, bn, bk in itertools.product(BM, BN, BK)
        for warp in ((32, 32, 16), (16, 16, 32))
        if bk <= 80 and bm % warp[0] == 0 and bn % warp[1] == 0 and bk % warp[2] == 0
    ]
    # Four pipelines on any arch, three biases, two caps, no rule that excludes any.
    assert len(rows) == len(tiles) * 4 * 3 * 2
    assert {r["pipeline"] for r in rows} == {"qr", "qr_async", "qr_async_trload", "qr_async_trload_v3"}
    assert all(r["pad_s"] == r["pad_dv"] == "0" and r["logits"] in "01" for r in rows)
    assert any(r["logits"] == "1" and r["bias"] == "alibi" for r in rows)


def test_exhaustive_backward_by_brute_force():
    rows = enumerate_rows("--arch", "gfx942", "--variant", "bwd", "--mode", "exhaustive", "--hdims", "64x64",
                          "--filter", "family == 'bwd_dq_dk_dv' and data_type == 'bf16'")
    tiles = {
        (bm, bn, bk)
        for bm, bn, bk in itertools.product(BM, BN, BK)
        for warp in ((32, 32, 16), (16, 16, 32))
        if bk <= 64 and bm % warp[0] == 0 and bn % warp[1] == 0 and bk % warp[2] == 0
    }
    # modes, masks, biases, dropouts, deterministic
    assert len(rows) == len(tiles) * 2 * 3 * 3 * 3 * 2
    by_tile = {tuple(int(r[f]) for f in ("tile_m0", "tile_n0", "tile_k0")): r for r in rows}
    # In the table, found by its first row of the size, and not in the table at all.
    assert [by_tile[32, 128, 64][f] for f in ("wave_n0", "wave_m1", "wave_n2", "warp_k1")] == ["4", "4", "4", "16"]
    assert [by_tile[32, 16, 64][f] for f in ("wave_n0", "wave_m1", "wave_n2", "warp_k1")] == ["1", "1", "1", "16"]
    assert [by_tile[64, 64, 32][f] for f in ("wave_n0", "wave_m1", "wave_n2", "warp_k1")] == ["2", "4", "2", "16"]
    assert len({tuple(r.values()) for r in rows}) == len(rows)


# ---- the command line ------------------------------------------------------------------------------


def test_count_and_formats(tmp_path):
    args = ("--arch", "gfx950", "--rules", "ck", "--variant", "appendkv")
    assert fmhactl("enumerate", *args, "--count") == "220\n"
    out = tmp_path / "rows.csv"
    assert fmhactl("enumerate", *args, "--out", out) == ""
    rows = out.read_text().splitlines()
    assert rows[0] == HEADER and len(rows) == 221
    names = fmhactl("enumerate", *args, "--format", "names").splitlines()
    assert len(set(names)) == 220
    objects = json.loads(fmhactl("enumerate", *args, "--format", "json"))
    assert [o["name"] for o in objects] == names
    assert objects[0]["paged_kv"] is False and objects[0]["hdim_q"] == 32
    assert len(objects[0]) == 60
    empty = json.loads(fmhactl("enumerate", *args, "--format", "json", "--filter", "false"))
    assert empty == []


def test_all_variants_together():
    for arch, total in (("gfx942", 2996082), ("gfx950", 2797794), ("gfx1100", 3199520)):
        assert int(fmhactl("enumerate", "--arch", arch, "--rules", "ck", "--count")) == total


def test_filter_counts_what_python_counts():
    rows = enumerate_rows("--arch", "gfx950", "--variant", "bwd")
    text = "hdim_q in (64, 128) and (mask == 'top_left' or deterministic) and not tile_m0 > 16"
    expected = sum(
        r["hdim_q"] in ("64", "128") and (r["mask"] == "top_left" or r["deterministic"] == "1")
        and not int(r["tile_m0"]) > 16
        for r in rows
    )
    assert 0 < expected < len(rows)
    assert int(fmhactl("enumerate", "--arch", "gfx950", "--rules", "ck", "--variant", "bwd", "--filter", text, "--count")) == expected


def test_filter_files_and_together(tmp_path):
    """--filter and every --filter-file have to hold; a file may have lines and comments."""
    rows = enumerate_rows("--arch", "gfx942", "--variant", "bwd")
    first, second = tmp_path / "h128", tmp_path / "no_dropout"
    first.write_text("# what models have\nhdim_q == 128  # '#' begins a comment\n    and hdim_v == 128\n")
    second.write_text("not dropout and mask != '#' or 0\n".replace("mask != '#'", "tile_tag != 'small'"))
    args = ("--arch", "gfx942", "--rules", "ck", "--variant", "bwd", "--filter-file", first, "--filter-file", second)
    wanted = [r for r in rows if r["hdim_q"] == r["hdim_v"] == "128" and r["dropout"] == "0" and r["tile_tag"] != "small"]
    assert 0 < len(wanted) < len(rows)
    assert int(fmhactl("enumerate", *args, "--count")) == len(wanted)
    causal = [r for r in wanted if r["mask"] == "top_left"]
    lines = fmhactl("enumerate", *args, "--filter", "mask == 'causal'").splitlines()
    assert lines[1:] == [",".join(r.values()) for r in causal]
    first.write_text("hdim_q == 128 and\nhdim_k == 128\n")
    said = fmhactl("enumerate", *args, "--count", code=2).splitlines()
    assert str(first) in said[0] and "no field 'hdim_k'" in said[0]
    assert said[2].index("^") == said[1].index("hdim_k")
    assert "No such file" in fmhactl("enumerate", "--arch", "gfx942", "--filter-file", tmp_path / "none", code=5)
    first.write_text("lse " * 2000)
    assert "4096 bytes at most" in fmhactl("enumerate", *args, code=2)


def test_profiles_and_receipts_by_either_word():
    count = lambda *a: int(fmhactl("enumerate", "--rules", "ck", "--arch", "gfx942", *a, "--count"))
    for name, number in (("flash_fwd", 2), ("pytorch", 4), ("fp8_test", 888)):
        assert count("--variant", "fwd", "--profile", name) == count("--variant", "fwd", "--profile", number)
        assert count("--variant", "fwd", "--receipt", name) == count("--variant", "fwd", "--receipt", number)
    assert "the profile has none" in fmhactl("enumerate", "--arch", "gfx942", "--receipt", "all", code=2)
    assert "there is none; there are 0 (ck_default)" in fmhactl("enumerate", "--arch", "gfx942", "--receipt", "7", code=2)
    assert "there is none" in fmhactl("enumerate", "--arch", "gfx942", "--profile", "7", code=2)


def test_fp32_profiles_have_their_kernels():
    """AMD's receipt 801 drops fp32; the profile of its name is about nothing else."""
    count = lambda *a: int(fmhactl("enumerate", "--rules", "ck", "--arch", "gfx942", *a, "--count"))
    tiles = {h: len(forward_tiles("gfx942", "fp32", h, h, "qr")) for h in (32, 48, 64, 128, 192, 256)}
    tiles[96] = len(forward_tiles("gfx942", "fp32", 96, 128, "qr"))
    # Masks, sinks, pads; for all of fp32 also biases, LSE, dropout, and group mode, which needs one of the pads.
    assert count("--profile", "fp32_min") == count("--profile", 801) == 3 * 2 * 3 * (tiles[48] + tiles[128])
    assert count("--profile", "fp32_all") == 3 * 2 * (3 + 1) * 3 * 2 * 2 * sum(tiles.values())
    # The receipts themselves stay as AMD has them.
    assert count("--variant", "fwd", "--receipt", 801) == count("--variant", "fwd", "--receipt", 0)


def test_mx_types_are_named_as_not_supported(tmp_path):
    spec = {"family": "fwd", "gfx_arch": "gfx950", "data_type": "mxfp8", "pipeline": "qr", "tile": [128, 128, 32, 128, 32, 128]}
    path = tmp_path / "spec.json"
    for name in ("mxfp8", "mxfp4"):
        path.write_text(json.dumps(dict(spec, data_type=name)))
        assert f"data_type {name}: not supported" in fmhactl("validate", path, code=1)
        config = tmp_path / "sweep.json"
        config.write_text(json.dumps({"variant": "fwd", "trait_config": {"data_type": {"values": [name]}}}))
        assert fmhactl("enumerate", "--arch", "gfx950", "--config", config, "--count") == "0\n"
        for words in (("run", "forward", f"-prec={name}"), ("plan", "--arch", "gfx950", "--dtype", name)):
            assert f"'{name}': not supported" in fmhactl(*words, code=2)


# ---- kernel sets -----------------------------------------------------------------------------------


def write_set(path, *kernels, **more):
    path.write_text(json.dumps({"set": path.stem, "kernels": list(kernels), **more}))
    return path


def test_kernel_sets(tmp_path):
    """What a set declares is what a filter finds in the lists, and nothing where it cannot be."""
    kernel = {"family": "fwd", "data_type": ["fp16", "bf16"], "hdim": 128, "mask": ["no_mask", "causal"],
              "pipeline": "qr_async", "tile": [128, 128, 32], "gfx_arch": "gfx942"}
    path = write_set(tmp_path / "prefill.json", kernel)
    lines = fmhactl("enumerate", "--set", path).splitlines()
    assert lines[0] == HEADER
    rows = enumerate_rows("--arch", "gfx942", "--variant", "fwd", "--filter",
                          "data_type in ('fp16', 'bf16') and hdim_q == 128 and mask in ('no', 'top_left') and bias == 'no' "
                          "and tile_k0 == 32 and warp_m0 == 32 and pad_s and mode == 'batch' and not "
                          "(lse or dropout or logits or sink or skip_min_seqlen_q) and pad_sk")
    rows = [r for r in rows if r["hdim_v"] == "128" and r["pipeline"] == "qr_async"]
    assert sorted(lines[1:]) == sorted(",".join(r.values()) for r in rows) and len(rows) == 4
    # Another set is added to it; a filter holds for all; an arch picks.
    other = write_set(tmp_path / "other.json", dict(kernel, gfx_arch="*", data_type="bf16", mask="no"))
    assert fmhactl("enumerate", "--set", path, "--set", other, "--count") == "6\n"
    assert fmhactl("enumerate", "--set", path, "--set", other, "--count", "--arch", "gfx950") == "1\n"
    assert fmhactl("enumerate", "--set", path, "--set", other, "--count", "--filter", "mask == 'causal'") == "2\n"
    assert fmhactl("enumerate", "--set", path, "--count", "--profile", "flash_bwd") == "0\n"
    # Their names are names.
    names = fmhactl("enumerate", "--set", path, "--set", other, "--format", "names")
    assert fmhactl("validate", "-", text=names) == ""
    # Of this build's own kernels: those that build would compile.
    own = write_set(tmp_path / "own.json", {"family": "fwd", "data_type": "bf16", "hdim": 128}, rules="gpu")
    assert int(fmhactl("enumerate", "--set", own, "--arch", "sm_90a", "--count")) > 1
    table = fmhactl("enumerate", "--set", own, "--arch", "sm_90a")
    assert table.splitlines()[0] == fmhactl("enumerate", "--arch", "sm_90a", "--variant", "fwd").splitlines()[0]
    assert {line.count(",") for line in table.splitlines()} == {table.splitlines()[0].count(",")}
    # AMD's have fewer columns: not in one table.
    both = ("--set", path, "--set", own, "--arch", "gfx942")
    assert "have not the same columns" in fmhactl("enumerate", *both, code=2)
    assert len(json.loads(fmhactl("enumerate", *both, "--format", "json"))) == int(fmhactl("enumerate", *both, "--count")) > 4
    built = fmhactl("build", "--arch", "sm_90a", "--list", "--set", own).split()
    assert len(built) > 2 and all("fwd_bf16" in name and "h128x128" in name for name in built if "prepare" not in name)
    # Of the set what a filter's file, and another, let through.
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("tile_m0 == 128  # many rows\n")
    second.write_text("pipeline == 'gpu_wgmma'\n")
    words = ("--arch", "sm_90a", "--set", own, "--filter-file", first)
    wide = fmhactl("build", *words, "--list").split()
    narrow = fmhactl("build", *words, "--list", "--filter-file", second).split()
    assert set(narrow) < set(wide) < set(built)
    first.write_text("tile_q > 1\n")
    said = fmhactl("build", *words, "--list", code=2)
    assert f"{first}: " in said and "no field 'tile_q'" in said


@pytest.mark.parametrize("change,reason", [
    ({"tile": [128, 64, 32]}, "/kernels/0: tile 128x64x32: pipeline qr_async has no such tile"),
    ({"hdim": 36}, "hdim_q 36: not a multiple of 8"),
    ({"tiles": 1}, "/kernels/0/tiles: there is no field 'tiles'"),
    ({"mask": "casual"}, "/kernels/0/mask: 'casual' is not a mask"),
])
def test_kernel_sets_explain_mistakes(tmp_path, change, reason):
    kernel = {"family": "fwd", "data_type": "bf16", "hdim": 128, "pipeline": "qr_async", "tile": [128, 128, 32]}
    path = write_set(tmp_path / "set.json", dict(kernel, **change))
    assert reason in fmhactl("enumerate", "--set", path, "--arch", "gfx942", code=2)
    assert "gfx_arch is missing" in fmhactl("enumerate", "--set", write_set(path, kernel), code=2)
    assert "a kernel set says all" in fmhactl("enumerate", "--set", path, "--variant", "fwd", code=2)


def test_filter_fault_has_a_caret():
    said = fmhactl("enumerate", "--arch", "gfx950", "--filter", "lse and pipline == 'qr'", code=2)
    lines = said.splitlines()
    assert "no field 'pipline'" in lines[0]
    assert lines[2].index("^") == lines[1].index("pipline")


def test_profiles():
    listed = fmhactl("profiles")
    assert "flash_fwd" in listed and "aiter_bwd_group" in listed
    count = lambda *a: int(fmhactl("enumerate", "--rules", "ck", *a, "--count"))
    # fp32 exists only in its receipts; RDNA loses what its list of pipelines does not have.
    assert count("--arch", "gfx942", "--config", "receipt0_fwd", "--profile", "fp32_all") == 0
    assert count("--arch", "gfx1100", "--variant", "batch_prefill", "--profile", "all") == 0
    batch = count("--arch", "gfx942", "--variant", "bwd", "--profile", "aiter_bwd_batch")
    group = count("--arch", "gfx942", "--variant", "bwd", "--profile", "aiter_bwd_group")
    assert batch + group == 12192
    assert "there is none" in fmhactl("enumerate", "--arch", "gfx942", "--profile", "nonesuch", code=2)


def test_what_is_not_ours_is_never_counted_unasked():
    """A profile is of our kernels; words that only CK has are answered by its rules, and that is said."""
    def run(*words):
        return subprocess.run([FMHACTL, "enumerate", "--count", "--variant", "fwd", *words], capture_output=True, text=True, check=True)

    for arch in ("gfx950", "gfx942", "gfx1100", "gfx90a"):
        ours, theirs = (run("--arch", arch, "--profile", "pytorch", "--rules", rules) for rules in ("gpu", "ck"))
        plain = run("--arch", arch, "--profile", "pytorch")
        assert plain.stdout == ours.stdout != theirs.stdout and plain.stderr == ""
    receipt = run("--arch", "gfx942", "--receipt", "2")
    assert "by the rules 'ck'" in receipt.stderr
    asked = run("--arch", "gfx942", "--receipt", "2", "--rules", "ck")
    assert asked.stdout == receipt.stdout and asked.stderr == ""


def test_archs():
    listed = {line.split()[0]: line.split()[1:4] for line in fmhactl("archs").splitlines()}
    assert {arch for arch, words in listed.items() if "ck" in words[2].split(",")} == {
        p.stem for p in (SPECS / "arch").glob("*.json")}
    assert {"sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "portable", "x86_64_v3", "x86_64_v4",
            "x86_64_v4_bf16", "x86_64_amx"} <= set(listed)
    # Siblings of what was measured.
    assert {"sm_86", "sm_103a", "gfx1101", "gfx1200"} <= set(listed)
    assert listed["gfx942"] == ["amd", "cdna3", "gpu,ck"] and listed["sm_90a"] == ["nvidia", "hopper", "gpu"]


def test_the_default_is_what_this_build_runs():
    count = lambda *a: int(fmhactl("enumerate", *a, "--count"))
    assert count("--arch", "gfx942") == count("--arch", "gfx942", "--rules", "gpu") > 30000
    assert count("--arch", "sm_86") == count("--arch", "sm_89")
    assert count("--arch", "portable") == count("--arch", "x86_64_v4", "--rules", "cpu") > 100
    # Sweeps and receipts are AMD's.
    assert count("--arch", "gfx942", "--config", "bwd") == count("--arch", "gfx942", "--rules", "ck", "--variant", "bwd")
    assert "sweeps are for rules 'ck'" in fmhactl("enumerate", "--arch", "sm_80", "--config", "fwd", code=2)
    names = fmhactl("enumerate", "--arch", "gfx942", "--variant", "bwd", "--format", "names", "--hdims", "64").splitlines()
    assert all("-gpu_" in name for name in names)
    assert fmhactl("validate", "-", text="\n".join(names)) == ""
    # A tile that nobody has is not valid.
    tile = next(n for n in names if n.startswith("bwd_dq_dk_dv-bf16") and "-t32x64x" in n)
    assert "no tile of gpu_mfma is cut like this" in fmhactl(
        "validate", tile.replace("-t32x64x", "-t48x64x").replace("x32x64x64x64", "x48x64x64x64"), code=1)
    assert "pad_s 0" in fmhactl("validate", tile.replace("-p1111-", "-p0111-"), code=1)


@pytest.mark.parametrize("args,reason", [
    ((), "--arch is missing"),
    (("--arch", "gfx9999"), "there is none"),
    (("--arch", "gfx942", "--variant", "fwd", "--config", "fwd"), "exclude each other"),
    (("--arch", "gfx942", "--variant", "nonesuch"), "none of that name"),
    (("--arch", "gfx942", "--receipt", "x"), "--receipt x: there is none; there are"),
    (("--arch", "gfx942", "--mode", "fast"), "--mode 'fast': not one of rules exhaustive"),
    (("--arch", "gfx942", "--format", "xml"), "--format 'xml': not one of csv json names"),
    (("--arch", "gfx942", "--hdims", "64y64"), "--hdims"),
    (("--arch", "gfx942", "--profile", "all", "--receipt", "1"), "exclude each other"),
    (("--arch", "gfx942", "extra"), "what is 'extra'"),
])
def test_usage_errors(args, reason):
    assert reason in fmhactl("enumerate", *args, code=2)


@pytest.mark.parametrize("rules,arch,packed,deterministic,splits,head,zero", [
    # AMD's: one buffer for atomic adds; one a tile of keys; as many as workgroups meet a head, which are as many here.
    ("ck", "gfx942", False, False, 1, 16, True), ("ck", "gfx942", True, False, 1, 64, True),
    ("ck", "gfx942", True, True, None, 64, False), ("ck", "gfx942", False, True, None, 16, True),
    # Ours: a second pass; tiles that are added to in order; one buffer that is written in full.
    ("gpu", "gfx942", False, False, 0, 0, False), ("gpu", "gfx942", True, True, 0, 0, False),
    ("gpu", "sm_90a", True, True, 1, 64, True), ("cpu", "x86_64_v4", False, True, 1, 16, False), ("cpu", "x86_64_v4", True, True, 1, 64, False),
])
def test_workspaces_of_backward(rules, arch, packed, deterministic, splits, head, zero):
    """client/docs/backward.md: which kernels need what beside D, which is a float a row and head."""
    words = ["-b=4", "-h=8", "-s=512", "-d=128", "-prec=bf16", *(["-mode=1"] * packed), *(["--deterministic"] * deterministic)]
    plan = json.loads(fmhactl("plan", "backward", *words, "--arch", arch, "--rules", rules, "--json"))["plan"]
    if splits is None:
        kernel = next(stage["kernel"] for stage in plan["stages"] if stage["kernel"].startswith("bwd_dq_dk_dv"))
        splits = 512 // int(re.search(r"-t\d+x(\d+)x", kernel).group(1))
        assert splits >= 4
    assert (plan["dq_splits"], plan["workspace_head_bytes"], plan["workspace_zero"]) == (splits, head, zero)
    rows = 4 * 512 * 8
    assert plan["workspace_bytes"] >= head + 4 * rows + plan["dq_acc_bytes"]
    if splits == 0:  # nothing but D
        assert plan["workspace_bytes"] == 4 * rows and plan["dq_acc_bytes"] == 0
    elif arch != "sm_90a":
        assert plan["dq_acc_bytes"] == 4 * rows * 128 * splits
    stages = [stage["family"] for stage in plan["stages"]]
    assert stages == ["bwd_dot_do_o", "bwd_dq_dk_dv", *(["bwd_convert_dq"] * (splits > 0))]


def test_backward_splits_by_keys():
    """Few rows and many keys: so many sums of dQ, whose size is said to the byte; of packed ones by each one's keys."""
    few = ["-b=1", "-h=1", "-s=384", "-s_k=32768", "-d=64", "-prec=bf16"]
    plan = lambda *words: json.loads(fmhactl("plan", "backward", *words, "--json"))["plan"]
    d, sums = 384 * 4, 384 * 64 * 4
    for words, splits in ((["--units=8"], 8), (["--units=1"], 1), (["--units=8", "--splits=1"], 1), (["--units=1", "--splits=3"], 3)):
        got = plan(*few, "--arch", "x86_64_v3", *words)
        assert (got["dq_splits"], got["dq_acc_bytes"], got["workspace_zero"]) == (splits, splits * sums, False), words
        assert got["dq_split_keys"] == (0 if splits == 1 else -(-86 // splits) * 384)
        assert 16 + d + splits * sums <= got["workspace_bytes"] < 16 + d + splits * sums + 256
    got = plan("-b=1", "-h=8", "-s=256", "-s_k=65536", "-d=128", "--arch", "gfx942", "--deterministic")
    assert (got["dq_splits"], got["dq_acc_bytes"], got["workspace_zero"]) == (5, 5 * 8 * 256 * 128 * 4, False)
    stage = got["stages"][1]
    assert stage["pipeline"] == "gpu_amd" and stage["grid"][0] == 65536 // 128 + 5 * 256 // 128
    assert "no backward kernel of sm_90a" in fmhactl("plan", "backward", *few, "--splits=3", "--arch", "sm_90a", code=4)
    # Packed: the plan says the most for any lengths, and what these take, which counts each sequence's own splits.
    packed = ["-b=3", "-h=2", "-s=64,32,16", "-s_k=4096,300,2000", "-d=64", "-mode=1", "-prec=bf16", "--splits=4"]
    got = plan(*packed, "--arch", "x86_64_v3")
    assert (got["dq_splits"], got["dq_split_keys"]) == (4, 6 * 192)
    assert got["dq_acc_bytes"] == 112 * 4 * 2 * 64 * 4
    assert got["workspace_bytes"] - got["run_workspace_bytes"] == got["dq_acc_bytes"] - (64 * 4 + 32 * 1 + 16 * 2) * 2 * 64 * 4
    assert f"; {got['run_workspace_bytes']} for these lengths" in fmhactl("plan", "backward", *packed, "--arch", "x86_64_v3")
    # What needs no buffer has none: D alone; forward nothing at all.
    direct = plan("-b=1", "-h=8", "-s=256", "-s_k=65536", "-d=128", "--arch", "gfx942", "--splits=1")
    assert direct["workspace_bytes"] == 8 * 256 * 4 and len(direct["stages"]) == 2
    assert json.loads(fmhactl("plan", "forward", "-b=1", "-h=8", "-s=256", "-d=128", "--arch", "gfx942", "--json"))["plan"]["workspace_bytes"] == 0


def test_backward_cuts_heads_that_share_keys():
    """Where few blocks leave a card idle Hopper's have a part of the heads, and a third stage that adds what they sum of dK and dV."""
    plan = lambda *words: json.loads(fmhactl("plan", "backward", *words, "--arch", "sm_90a", "--json"))["plan"]
    few = ["-h=16", "-h_k=2", "-s=4096", "-d=128"]
    got, whole = plan(*few), plan("-h=16", "-s=4096", "-d=128")
    assert (got["kv_parts"], whole["kv_parts"]) == (2, 1)
    assert [stage["family"] for stage in got["stages"]] == ["bwd_dot_do_o", "bwd_dq_dk_dv", "bwd_convert_dq"]
    assert got["stages"][1]["grid"] == [2 * 2 * 32, 1, 1] and whole["stages"][1]["grid"] == [16 * 32, 1, 1]
    # Two chunks of each of 64 tiles of 16 heads; a thread eight elements of dK or dV.
    assert got["stages"][2]["grid"] == [64 * 2 * 16 + 2 * 4096 * 256 // 8 // 128, 1, 1] and whole["stages"][2]["grid"] == [64 * 2 * 16, 1, 1]
    assert 0 <= got["workspace_bytes"] - whole["workspace_bytes"] - 2 * 2 * 4096 * 256 * 4 < 512
    assert "parts      2 of the heads that share keys: about 602 us, 1172 in one part" in fmhactl("plan", "backward", *few, "--arch", "sm_90a")
    assert plan(*few, "--causal")["kv_parts"] == 4
    assert plan(*few, "--causal", "--deterministic")["kv_parts"] == 4
    assert plan(*few, "--units=1")["kv_parts"] == 1
    assert plan(*few, "--mask-endpoints=1")["kv_parts"] == 1, "a mask in memory is searched for all heads of a block"
    # Packed: as if all were of the longest one's length, and fewer.
    assert plan("-b=3", "-h=16", "-h_k=2", "-s=4096,100,30", "-mode=1")["kv_parts"] == 2
    other = json.loads(fmhactl("plan", "backward", *few, "--arch", "sm_80", "--json"))["plan"]
    assert other["kv_parts"] == 0 and len(other["stages"]) == 2


def test_output_that_cannot_be_written():
    assert "No such file" in fmhactl("enumerate", "--arch", "gfx942", "--out", "/nonexistent/x", code=5)
    full = subprocess.run([FMHACTL, "enumerate", "--arch", "gfx942", "--variant", "bwd", "--out", "/dev/full"],
                          capture_output=True, text=True)
    assert full.returncode == 5 and "No space" in full.stderr


def test_validate(tmp_path):
    name = fmhactl("enumerate", "--arch", "gfx942", "--rules", "ck", "--variant", "bwd", "--format",
                   "names").splitlines()[0]
    assert fmhactl("validate", name) == ""
    assert "expected a number" in fmhactl("validate", name.replace("h32", "hx"), code=1)
    bad = name.replace("-h32-", "-h36-")
    assert "hdim_q 36: not a multiple of 8" in fmhactl("validate", bad, code=1)
    # Rows from standard input, with their header.
    rows = fmhactl("enumerate", "--arch", "gfx942", "--rules", "ck", "--variant", "bwd")
    assert fmhactl("validate", "-", text=rows) == ""
    broken = rows.replace("bwd_dot_do_o,fp16,batch", "bwd_dot_do_o,fp17,batch", 1)
    assert "line 2: error: data_type 'fp17'" in fmhactl("validate", "-", text=broken, code=1)
    # Objects as people write them.
    spec = {"family": "fwd", "gfx_arch": "gfx942", "data_type": "bf16", "pipeline": "qr",
            "tile": [128, 128, 32, 128, 32, 128], "pads": [1, 1, 1, 1]}
    path = tmp_path / "specs.json"
    path.write_text(json.dumps(spec))
    assert fmhactl("validate", path) == ""
    # By other words for the same, as AMD's command lines have them.
    path.write_text(json.dumps(dict(spec, mask="causal", bias="elementwise", vlayout="row", qscale="no_scale")))
    assert fmhactl("validate", path) == ""
    path.write_text(json.dumps([spec, dict(spec, tile=[1, 2, 3]), dict(spec, tiles=1), dict(spec, gfx_arch="gfx1")]))
    said = fmhactl("validate", path, code=1)
    assert "spec 1: error:" in said and "/1/tile: a tile must have 6 numbers" in said
    assert "/2/tiles: there is no field 'tiles'" in said
    assert "/3/gfx_arch: 'gfx1' is not a gfx_arch" in said
    assert "4 specs, 3 invalid" in said
    path.write_text("{")
    assert "not JSON" in fmhactl("validate", path, code=5)
    assert "no spec is given" in fmhactl("validate", code=2)


# ---- the JSON files --------------------------------------------------------------------------------


def schema(kind):
    loaded = json.loads((SPECS / "schema" / f"{kind}.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(loaded)
    return jsonschema.Draft7Validator(loaded)


FILES = [("words", SPECS / "words.json"), ("profiles", SPECS / "profiles.json")] + [
    (kind, path)
    for kind, folder in (("arch", "arch"), ("rules", "rules"), ("sweep", "sweeps"), ("shapes", "shapes"))
    for path in sorted((SPECS / folder).glob("*.json"))
]


@pytest.mark.parametrize("kind,path", FILES, ids=[f"{k}-{p.stem}" for k, p in FILES])
def test_files_follow_their_schema(kind, path):
    errors = [f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in schema(kind).iter_errors(
        json.loads(path.read_text()))]
    assert errors == []


@pytest.mark.parametrize("kind,name,change", [
    ("words", "words", lambda d: d["pipelines"].append("Q-R")),
    ("words", "words", lambda d: d["data_types"]["fp16"].pop("bytes")),
    ("profiles", "profiles", lambda d: d["profiles"][0].pop("keep")),
    ("arch", "arch/gfx942", lambda d: d["spaces"][0]["head_dims"]["fp16"].append([1, 2, 3])),
    ("arch", "arch/gfx942", lambda d: d.pop("spaces")),
    ("arch", "arch/gfx942", lambda d: d["spaces"][0].update(lds=1)),
    ("rules", "rules/ck", lambda d: d["variants"]["fwd"][0].update(familly="fwd")),
    ("rules", "rules/ck", lambda d: d["validate"][0].pop("message")),
    ("shapes", "shapes/smoke", lambda d: d["groups"][0]["set"].update(bach=1)),
    ("shapes", "shapes/smoke", lambda d: d["groups"][0]["for"].append({"mask": ["causal"]})),
    ("sweep", "sweeps/fwd", lambda d: d.update(varient="fwd")),
    ("sweep", "sweeps/fwd", lambda d: d["trait_config"].update(lse=[True])),
])
def test_schemas_reject_mistakes(kind, name, change):
    document = json.loads((SPECS / f"{name}.json").read_text())
    assert schema(kind).is_valid(document)
    change(document)
    assert not schema(kind).is_valid(document)


def test_shape_tiers():
    """The tiers as tests/lib/shapes.py reads them; the library's own reading is in test_shapes.c."""
    counts = {tier: len(shapes.load(tier)) for tier in ("smoke", "full", "nightly")}
    assert counts == {"smoke": 360, "full": 1829, "nightly": 4153}
    seen = [tuple(sorted((k, v) for k, v in s.items() if k != "group")) for s in shapes.load("full")]
    # Groups overlap a little; a tier that mostly repeats itself would be a mistake.
    assert len(set(seen)) > 0.97 * len(seen)
