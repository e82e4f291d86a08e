# SPDX-License-Identifier: MIT
"""fmhactl as people use it: options, exit codes, files, and what it prints."""
import json
import os
import re
import subprocess

import numpy
import pytest

import fmhad

OK, FAILED, USAGE, UNREACHABLE, REFUSED, IO, LATE = range(7)
COMMANDS = ["ping", "status", "devices", "run", "verify", "plan", "registry"]
rng = numpy.random.default_rng(7)


@pytest.fixture(scope="module", name="daemon")
def fixture_daemon():
    with fmhad.Daemon() as daemon:
        yield daemon


@pytest.fixture(name="fmhactl")
def fixture_fmhactl(daemon, tmp_path):
    def run(*arguments, expect=OK, socket=daemon.socket):
        done = subprocess.run(
            [fmhad.find_program("fmhactl"), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "FMHAD_SOCKET": socket},
        )
        assert done.returncode == expect, done.stdout + done.stderr
        if expect not in (OK, FAILED):
            assert any(word in done.stderr for word in ("fmhactl: ", "usage", "option"))
        if expect == USAGE:
            assert "--help` says more" in done.stderr or "usage: " in done.stderr
        return done.stdout if expect in (OK, FAILED) else done.stderr

    return run


def bfloat16(array):
    bits = array.view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def save(directory, dtype="float32", **shapes):
    """Random .npy files; returns the options that name them."""
    options = []
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, dtype=numpy.float32)
        array = bfloat16(array) if dtype == "bfloat16" else array.astype(dtype)
        path = directory / f"{name}.npy"
        numpy.save(path, array)
        options += ["--" + name.replace("_", "-"), path]
    return options


def attention(q, k, v, causal=False):
    """[batch, seqlen, heads, hdim] in float64."""
    q, k, v = (x.astype(numpy.float64) for x in (q, k, v))
    k, v = (numpy.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = numpy.einsum("bihd,bjhd->bhij", q, k) / numpy.sqrt(q.shape[3])
    if causal:
        rows, columns = numpy.indices(s.shape[2:])
        s[:, :, columns > rows + s.shape[3] - s.shape[2]] = -numpy.inf
    p = numpy.exp(s - s.max(axis=3, keepdims=True))
    lse = numpy.log(p.sum(axis=3)) + s.max(axis=3)
    return numpy.einsum("bhij,bjhd->bihd", p / p.sum(axis=3, keepdims=True), v), lse


# ---- help, usage, exit codes ----


def test_every_command_explains_itself(fmhactl):
    text = fmhactl("help")
    for command in COMMANDS:
        assert f"  {command} " in text
        assert fmhactl(command, "--help").startswith(f"usage: fmhactl {command}")
    assert "exit codes" in text
    assert fmhactl("--version").startswith("fmhactl ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["ping", "--nonsense"],
        ["ping", "--count", "0"],
        ["ping", "--count", "ten"],
        ["ping", "extra"],
        ["status", "--device", "-1"],
        ["ping", "--timeout", "0"],
        ["run"],
        ["run", "sideways"],
        ["run", "forward"],
        ["run", "forward", "--q", "q.npy"],
        ["run", "backward", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy"],
        ["run", "forward", "--mask", "diagonal"],
        ["run", "forward", "--window", "5"],
        ["run", "forward", "--scale", "nan"],
        ["run", "forward", "--layout", "sbhd"],
        ["verify", "--cases", "-1"],
        ["verify", "--features", "magic"],
        ["plan", "sideways"],
        ["plan", "--dtype", "f64"],
        ["plan", "--units", "4"],
        ["registry"],
        ["registry", "delete"],
        ["registry", "load"],
        ["registry", "unload"],
        ["enumerate", "--arch", "gfx942", "--receipt", "999"],
        ["enumerate", "--arch", "gfx942", "--receipt", "-1"],
        ["archs", "extra"],
    ],
)
def test_wrong_usage_is_exit_code_2(fmhactl, arguments):
    fmhactl(*arguments, expect=USAGE)


@pytest.mark.parametrize(
    "command", ["ping", "status", "devices", "run forward", "verify", "plan", "plan backward",
                "registry load", "archs", "profiles", "enumerate", "validate"],
)  # fmt: skip
def test_an_unknown_option_names_program_and_help(fmhactl, command):
    text = fmhactl(*command.split(), "--nonsense", expect=USAGE)
    program = f"fmhactl {command.split()[0]}"
    assert f"{program}: unrecognized option '--nonsense'" in text
    assert f"`{program} --help` says more" in text


def test_options_stand_before_or_after_the_command(fmhactl, daemon):
    for words in (["ping", "--json", "--count", "2"], ["--json", "ping", "--count", "2"]):
        peers = json.loads(fmhactl(*words))
        assert peers[0]["peer"].startswith("front fmhad/") and peers[0]["median_ns"] > 0
    for words in (["--socket", daemon.socket, "devices", "--json"], ["devices", "--json", "--socket", daemon.socket]):
        assert json.loads(fmhactl(*words, socket="/nonexistent"))[0]["state"] == "ready"
    # A command that begins with a word keeps it first.
    exported = fmhactl("--socket", daemon.socket, "registry", "export", "--filter", "hdim_q == 1", socket="/nonexistent")
    assert "kernels" in json.loads(exported)


@pytest.mark.parametrize("words", [["--nonsense"], ["--nonsense", "ping"]])
def test_an_unknown_option_before_the_command(fmhactl, words):
    text = fmhactl(*words, expect=USAGE)
    assert "fmhactl: unrecognized option '--nonsense'" in text and "`fmhactl --help` says more" in text


def test_version_and_help_are_everywhere(fmhactl):
    for command in COMMANDS:
        for option in ("--version", "-V"):
            assert re.fullmatch(r"fmhactl \d+\.\d+\.\d+\n", fmhactl(command, option))
        if command not in ("run", "plan"):  # there it is the number of heads
            assert fmhactl(command, "-h") == fmhactl(command, "--help")
        assert fmhactl(command, "--help") == fmhactl("--timeout", 3, command, "--help")


def test_a_file_of_another_operation_is_refused(fmhactl):
    assert "--dq: not for this operation" in fmhactl("run", "forward", "--dq", "x.npy", expect=USAGE)


def test_an_unknown_receipt_names_the_known_ones(fmhactl):
    text = fmhactl("enumerate", "--arch", "gfx942", "--receipt", 999, expect=USAGE)
    assert "--receipt 999: there is none" in text and "4 (pytorch)" in text and "888 (fp8_test)" in text
    fmhactl("enumerate", "--arch", "gfx942", "--receipt", 4, "--variant", "fwd", "--count")


@pytest.mark.parametrize("command", [["ping"], ["status"], ["devices"], ["verify"], ["plan"]])
def test_no_daemon_is_exit_code_3(fmhactl, command):
    assert "/nonexistent" in fmhactl(*command, expect=UNREACHABLE, socket="/nonexistent/socket")
    fmhactl(*command, "--socket", "/nonexistent/other", expect=UNREACHABLE)


def test_no_daemon_names_every_socket_and_how_to_start_one(tmp_path):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    environment.pop("FMHAD_SOCKET", None)
    done = subprocess.run(
        [fmhad.find_program("fmhactl"), "ping"], env=environment, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    if done.returncode == OK:
        pytest.skip("this machine's own fmhad runs")
    assert done.returncode == UNREACHABLE
    assert f"{tmp_path}/fmhad.sock: No such file or directory; /run/fmhad/fmhad.sock: " in done.stderr
    assert "start it with `fmhad` or `systemctl start fmhad.socket`" in done.stderr


def test_a_refusal_is_exit_code_4(fmhactl):
    assert "device" in fmhactl("ping", "--device", 7, expect=REFUSED)
    assert "hdim_q" in fmhactl("plan", "--hdim", 584, expect=REFUSED)


# ---- what the daemon says of itself ----


def test_ping_reaches_front_and_worker(fmhactl, daemon):
    text = fmhactl("ping", "--count", 3)
    assert f"(pid {daemon.pid})" in text
    assert "device 0 (cpu, " in text


def test_status_is_the_daemons_json(fmhactl, daemon):
    status = json.loads(fmhactl("status", "--json"))
    assert status["front"]["pid"] == daemon.pid
    everything = fmhactl("status", "--all")
    assert "latency_ns:" in everything and "frame_bytes" in everything
    text = fmhactl("status")
    head, *rows = text.splitlines()
    assert head.startswith("fmhad ") and f"ready, pid {daemon.pid}" in head
    assert rows[rows.index("devices") + 2].split()[:3] == ["0", "ready", "cpu"]
    assert "_bytes" not in text and "frame_bytes" in fmhactl("status", "--limits")
    assert "cpu" in fmhactl("devices")


# ---- run ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_forward_writes_o_and_lse(fmhactl, tmp_path, dtype):
    files = save(tmp_path, dtype, q=(2, 33, 6, 40), k=(2, 50, 2, 40), v=(2, 50, 2, 24))
    text = fmhactl("run", "forward", *files, "--out", "o.npy", "--lse", "lse.npy", "--causal", "--check")
    assert text.count(": ok") == 2
    o, lse = numpy.load(tmp_path / "o.npy"), numpy.load(tmp_path / "lse.npy")
    q, k, v = (numpy.load(path) for path in files[1::2])
    if dtype == "bfloat16":
        q, k, v, o = ((x.astype(numpy.uint32) << 16).view(numpy.float32) for x in (q, k, v, o))
    expected, expected_lse = attention(q, k, v, causal=True)
    assert o.shape == (2, 33, 6, 24) and lse.shape == (2, 6, 33)
    bar = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert numpy.abs(o - expected).max() < bar
    assert numpy.abs(lse - expected_lse).max() < 1e-4


def test_heads_first_files_are_the_same_problem(fmhactl, tmp_path):
    files = save(tmp_path, q=(1, 20, 4, 32), k=(1, 30, 2, 32), v=(1, 30, 2, 32))
    fmhactl("run", "forward", *files, "--out", "o.npy")
    for path in files[1::2]:
        numpy.save(path, numpy.ascontiguousarray(numpy.load(path).transpose(0, 2, 1, 3)))
    fmhactl("run", "forward", *files, "--out", "t.npy", "--layout", "bhsd", "--check")
    assert numpy.array_equal(
        numpy.load(tmp_path / "t.npy").transpose(0, 2, 1, 3), numpy.load(tmp_path / "o.npy")
    )


def test_packed_sequences_bias_and_options(fmhactl, tmp_path):
    files = save(tmp_path, q=(30, 4, 32), k=(41, 2, 32), v=(41, 2, 32), alibi=(1, 4), sink=(4,))
    numpy.save(tmp_path / "sq.npy", numpy.array([0, 12, 30], numpy.int32))
    numpy.save(tmp_path / "sk.npy", numpy.array([0, 40, 41], numpy.int32))
    text = fmhactl(
        "run", "forward", *files, "--seqstart-q", "sq.npy", "--seqstart-k", "sk.npy",
        "--out", "o.npy", "--window", "10,2", "--softcap", "5", "--scale", "0.3",
        "--dropout", "0.25", "--seed", "11", "--check",
    )  # fmt: skip
    assert "batch 2 (packed)" in text and ": ok" in text
    assert numpy.load(tmp_path / "o.npy").shape == (30, 4, 32)


def test_masks_as_data(fmhactl, tmp_path):
    """Intervals of one sequence or of all, bits, what does not fit, and what they look like."""
    random = numpy.random.default_rng(3)
    files = save(tmp_path, q=(2, 40, 4, 32), k=(2, 60, 2, 32), v=(2, 60, 2, 32))
    endpoints = numpy.sort(random.integers(0, 61, (4, 3, 40)), 1).astype(numpy.int32)
    numpy.save(tmp_path / "one.npy", endpoints)
    numpy.save(tmp_path / "all.npy", numpy.tile(endpoints, (1, 1, 2)))  # cuDNN's form
    numpy.save(tmp_path / "even.npy", endpoints[:, :2])
    seen = (numpy.arange(60) < endpoints[:, 0, :, None]) | (
        (numpy.arange(60) >= endpoints[:, 1, :, None]) & (numpy.arange(60) < endpoints[:, 2, :, None]))
    numpy.save(tmp_path / "bits.npy", numpy.packbits(seen, axis=-1, bitorder="little"))
    for option, name in (("--mask-intervals", "one"), ("--mask-intervals", "all"), ("--mask-bits", "bits")):
        text = fmhactl("run", "forward", *files, option, f"{name}.npy", "--causal", "--out", f"{name}.o.npy", "--check")
        assert re.search(r"o +max error \S+, allowed \S+: ok", text)
        assert numpy.array_equal(numpy.load(tmp_path / f"{name}.o.npy"), numpy.load(tmp_path / "one.o.npy"))
    assert "mask_endpoints 2: even" in fmhactl("run", "forward", *files, "--mask-intervals", "even.npy", "--discard", expect=REFUSED)
    numpy.save(tmp_path / "short.npy", numpy.zeros((40, 7), numpy.uint8))
    assert "it should be (2, 4, 40, 8)" in fmhactl("run", "forward", *files, "--mask-bits", "short.npy", "--discard", expect=IO)
    for name in ("one", "bits"):
        text = fmhactl("mask", f"{name}.npy", "--keys", "60", "--head", "2").splitlines()
        assert text[-1] == f"40 rows, 60 keys: {seen[2].mean():.1%} seen, 100.0% of 128 x 128 tiles"
        assert text[:-1] == ["".join("#" if x else "." for x in row) for row in seen[2]]
        picture = fmhactl("mask", f"{name}.npy", "--keys", "60", "--head", "2", "--svg")
        assert picture.count("<rect") == 1 + seen[2].sum() and picture.rstrip().endswith("</svg>")
    assert "--head 4: one.npy has 4" in fmhactl("mask", "one.npy", "--head", "4", expect=USAGE)
    assert "must be odd" in fmhactl("mask", "even.npy", expect=USAGE)


def test_a_paged_cache(fmhactl, tmp_path):
    files = save(tmp_path, "float16", q=(2, 1, 8, 64), k=(7, 16, 2, 64), v=(7, 16, 2, 64))
    numpy.save(tmp_path / "table.npy", numpy.array([[6, 0, 3], [1, 5, 2]], numpy.int32))
    numpy.save(tmp_path / "lengths.npy", numpy.array([48, 33], numpy.int32))
    text = fmhactl(
        "run", "forward", *files, "--block-table", "table.npy", "--seqlen-k", "lengths.npy",
        "--out", "o.npy", "--check",
    )  # fmt: skip
    assert ": ok" in text
    report = json.loads(
        fmhactl(
            "run", "forward", *files, "--block-table", "table.npy", "--seqlen-k", "lengths.npy",
            "--out", "o.npy", "--check", "--json", "--repeat", 2,
        )  # fmt: skip
    )
    assert report["checks"][0]["ok"] and report["kernels"] and report["kernel_ms"] > 0


def test_a_cache_of_int8(fmhactl, tmp_path):
    """numpy's own type in files, under a Q of 16 bits and no other."""
    files = save(tmp_path, "float16", q=(2, 3, 8, 64))
    rng = numpy.random.default_rng(0)
    for name in "kv":
        numpy.save(tmp_path / f"{name}.npy", rng.integers(-128, 128, (2, 40, 2, 64)).astype(numpy.int8))
    files += ["--k", "k.npy", "--v", "v.npy"]
    factors = numpy.full((2, 2, 1), 0.0125, numpy.float32)
    numpy.save(tmp_path / "factor.npy", factors)
    text = fmhactl("run", "forward", *files, "--k-descale", "factor.npy", "--v-descale", "factor.npy", "--kv-type", "int8", "--out", "o.npy", "--check")
    assert ": ok" in text
    q, k, v = (numpy.load(tmp_path / f"{name}.npy").astype(numpy.float64) for name in "qkv")
    expected, _ = attention(q, k * 0.0125, v * 0.0125)
    assert numpy.abs(numpy.load(tmp_path / "o.npy") - expected).max() < 2e-3
    assert "--kv-type e4m3: the files have i8" in fmhactl("run", "forward", *files, "--kv-type", "e4m3", "--discard", expect=USAGE)
    numpy.save(tmp_path / "q.npy", numpy.ones((2, 3, 8, 64), numpy.int8))
    assert "tensor.q.dtype: i8, must be f16 or bf16" in fmhactl("run", "forward", *files, "--discard", expect=REFUSED)


def test_backward_makes_its_own_forward(fmhactl, tmp_path):
    shapes = {"q": (2, 20, 4, 32), "k": (2, 25, 2, 32), "v": (2, 25, 2, 32), "do": (2, 20, 4, 32)}
    files = save(tmp_path, **shapes)
    outputs = ["--dq", "dq.npy", "--dk", "dk.npy", "--dv", "dv.npy"]
    text = fmhactl("run", "backward", *files, *outputs, "--causal", "--check")
    assert text.count(": ok") == 3
    first = [numpy.load(tmp_path / f"{name}.npy") for name in ("dq", "dk", "dv")]
    assert [x.shape for x in first] == [shapes["q"], shapes["k"], shapes["v"]]
    fmhactl("run", "forward", *files[:6], "--out", "o.npy", "--lse", "lse.npy", "--causal")
    given = ["--o", "o.npy", "--lse", "lse.npy", "--deterministic"]
    fmhactl("run", "backward", *files, *given, *outputs, "--causal", "--check")
    for name, before in zip(("dq", "dk", "dv"), first):
        assert numpy.allclose(numpy.load(tmp_path / f"{name}.npy"), before, atol=1e-5)


def test_append_with_rotary_embedding(fmhactl, tmp_path):
    files = save(
        tmp_path, k=(2, 40, 2, 32), v=(2, 40, 2, 32), k_new=(2, 3, 2, 32), v_new=(2, 3, 2, 32),
        cos=(64, 16), sin=(64, 16),
    )  # fmt: skip
    numpy.save(tmp_path / "lengths.npy", numpy.array([5, 37], numpy.int32))
    text = fmhactl(
        "run", "append", *files, "--seqlen-k", "lengths.npy", "--rope", "half",
        "--k-out", "k2.npy", "--v-out", "v2.npy", "--check",
    )  # fmt: skip
    assert text.count(": ok") == 2
    before, after = numpy.load(tmp_path / "v.npy"), numpy.load(tmp_path / "v2.npy")
    new = numpy.load(tmp_path / "v_new.npy")
    assert numpy.array_equal(after[0, 5:8], new[0]) and numpy.array_equal(after[1, 37:40], new[1])
    assert numpy.array_equal(after[0, :5], before[0, :5])
    assert numpy.array_equal(after[0, 8:], before[0, 8:])


def test_files_are_read_strictly(fmhactl, tmp_path):
    files = save(tmp_path, q=(1, 8, 2, 16), k=(1, 8, 2, 16), v=(1, 8, 2, 16))
    run = ["run", "forward", *files, "--out", "o.npy"]
    fmhactl(*run)
    good = numpy.load(tmp_path / "k.npy")
    for bad, reason in (
        (good.astype(numpy.float64), "float32"),
        (good.astype(">f4"), "little endian"),
        (numpy.asfortranarray(good), "C order"),
        (good[:, :, :, 0], "3 when packed"),
        (numpy.array(1.0, numpy.float32), "dimensions"),
    ):
        numpy.save(tmp_path / "k.npy", bad)
        if reason == "3 when packed":
            fmhactl(*run, expect=IO)
        else:
            assert reason in fmhactl(*run, expect=IO)
    (tmp_path / "k.npy").write_bytes(b"no array")
    assert "k.npy: no .npy file" in fmhactl(*run, expect=IO)
    (tmp_path / "k.npy").unlink()
    assert "k.npy" in fmhactl(*run, expect=IO)
    numpy.save(tmp_path / "k.npy", good)
    fmhactl("run", "forward", *files, "--out", "/nonexistent/o.npy", expect=IO)


def test_what_does_not_fit_is_refused_by_name(fmhactl, tmp_path):
    files = save(tmp_path, q=(1, 8, 3, 16), k=(1, 8, 2, 16), v=(1, 8, 2, 16))
    assert "nhead_q" in fmhactl("run", "forward", *files, "--out", "o.npy", expect=REFUSED)
    files = save(tmp_path, q=(1, 8, 2, 584), k=(1, 8, 2, 584), v=(1, 8, 2, 16))
    assert "hdim_q" in fmhactl("run", "forward", *files, "--out", "o.npy", expect=REFUSED)
    files = save(tmp_path, q=(1, 8, 2, 16), k=(1, 9, 2, 16), v=(1, 8, 2, 16))
    text = fmhactl("run", "forward", *files, "--out", "o.npy", expect=IO)
    assert "v.npy: the shape is (1, 8, 2, 16), it should be (1, 9, 2, 16): seqlen_k is 9 by " in text
    assert text.rstrip().endswith("k.npy")


@pytest.mark.parametrize("wrong, by, shapes", [
    ("q", "batch is 3 by k", dict(q=(2, 8, 2, 16), k=(3, 9, 2, 16), v=(3, 9, 2, 16))),
    ("k", "batch is 2 by q", dict(q=(2, 8, 2, 16), k=(3, 9, 2, 16), v=(2, 9, 2, 16))),
    ("v", "batch is 2 by q", dict(q=(2, 8, 2, 16), k=(2, 9, 2, 16), v=(3, 9, 2, 16))),
    ("k", "hdim_q is 16 by q", dict(q=(2, 8, 2, 16), k=(2, 9, 2, 24), v=(2, 9, 2, 16))),
    ("v", "nhead_k is 2 by k", dict(q=(2, 8, 2, 16), k=(2, 9, 2, 16), v=(2, 9, 1, 16))),
    ("bias", "nhead_q is 2 by q", dict(q=(2, 8, 2, 16), k=(2, 9, 2, 16), v=(2, 9, 2, 16), bias=(2, 3, 8, 9))),
    ("sink", "nhead_q is 2 by q", dict(q=(2, 8, 2, 16), k=(2, 9, 2, 16), v=(2, 9, 2, 16), sink=(3,))),
])
def test_a_wrong_shape_is_blamed_on_its_file(fmhactl, tmp_path, wrong, by, shapes):
    files = save(tmp_path, **shapes)
    text = fmhactl("run", "forward", *files, "--out", "o.npy", expect=IO)
    assert f"{wrong}.npy: the shape is {shapes[wrong]}, it should be (" in text
    assert f"{by.rsplit(' ', 1)[0]} " in text and text.rstrip().endswith(f"{by[-1]}.npy")


PACKED = dict(q=(30, 4, 32), k=(41, 2, 32), v=(41, 2, 32))
PAGED = dict(q=(2, 1, 8, 64), k=(7, 16, 2, 64), v=(7, 16, 2, 64))
CACHE = dict(q=(2, 3, 4, 32), k=(5, 20, 2, 32), v=(5, 20, 2, 32))
TABLE, LENGTHS = [[6, 0, 3], [1, 5, 2]], [48, 33]


@pytest.mark.parametrize("field, shapes, tables", [
    ("seqstart_q", PACKED, dict(seqstart_q=[0, 31, 30], seqstart_k=[0, 40, 41])),
    ("seqstart_q", PACKED, dict(seqstart_q=[-5, 12, 30], seqstart_k=[0, 40, 41])),
    ("seqstart_q", PACKED, dict(seqstart_q=[0, 12, 2**30], seqstart_k=[0, 40, 41])),
    ("seqstart_k", PACKED, dict(seqstart_q=[0, 12, 30], seqstart_k=[0, -2**31, 41])),
    ("seqstart_k", PACKED, dict(seqstart_q=[0, 12, 30], seqstart_k=[7, 2**31 - 1, 41])),
    ("seqstart_k", PACKED, dict(seqstart_q=[0, 12, 30])),
    ("seqlen_k_per_batch", PACKED, dict(seqstart_q=[0, 12, 30], seqstart_k=[0, 40, 41], seqlen_k=[40, 2])),
    ("seqlen_q_per_batch", PACKED, dict(seqstart_q=[0, 12, 30], seqstart_k=[0, 40, 41], seqlen_q=[-1, 18])),
    ("block_table", PAGED, dict(block_table=[[6, 0, 7], [1, 5, 2]], seqlen_k=LENGTHS)),
    ("block_table", PAGED, dict(block_table=[[6, -2**31, 3], [1, 5, 2]], seqlen_k=LENGTHS)),
    ("max_blocks", PAGED, dict(block_table=TABLE, seqlen_k=[49, 33])),
    ("seqlen_k", PAGED, dict(block_table=TABLE, seqlen_k=[2**31 - 1, 33])),
    ("seqlen_k_per_batch", PAGED, dict(block_table=TABLE, seqlen_k=[48, -1])),
    ("kv_indptr", PAGED, dict(kv_indptr=[0, 9, 6], kv_page_indices=[6, 0, 3, 1, 5, 2], kv_last_page_len=[1, 1])),
    ("kv_page_indices", PAGED, dict(kv_indptr=[0, 3, 6], kv_page_indices=[6, 0, 99, 1, 5, 2], kv_last_page_len=[1, 1])),
    ("kv_last_page_len", PAGED, dict(kv_indptr=[0, 3, 6], kv_page_indices=[6, 0, 3, 1, 5, 2], kv_last_page_len=[17, 1])),
    ("kv_page_indices", PAGED, dict(kv_indptr=[0, 3, 6], kv_last_page_len=[1, 1])),
    ("cache_batch_idx", CACHE, dict(cache_batch_idx=[0, 5], seqlen_k=[20, 20])),
    ("cache_batch_idx", CACHE, dict(cache_batch_idx=[-1, 4], seqlen_k=[20, 20])),
    ("leftpad_k", CACHE, dict(cache_batch_idx=[0, 4], seqlen_k=[20, 20], leftpad_k=[21, 0])),
])
def test_a_bad_table_is_the_daemons_error_also_with_check(fmhactl, tmp_path, field, shapes, tables):
    files = save(tmp_path, "float32", **shapes)
    for name, values in tables.items():
        numpy.save(tmp_path / f"{name}.npy", numpy.array(values, numpy.int32))
        files += ["--" + name.replace("_", "-"), f"{name}.npy"]
    plain = fmhactl("run", "forward", *files, "--out", "o.npy", expect=REFUSED)
    assert field in plain
    assert fmhactl("run", "forward", *files, "--out", "o.npy", "--check", expect=REFUSED) == plain
    assert not (tmp_path / "o.npy").exists()


def test_a_bad_append_is_the_daemons_error_also_with_check(fmhactl, tmp_path):
    files = save(tmp_path, k=(2, 40, 2, 32), v=(2, 40, 2, 32), k_new=(2, 3, 2, 32), v_new=(2, 3, 2, 32))
    for bad in ([5, 38], [-1, 2], [2**31 - 1, 0]):
        numpy.save(tmp_path / "lengths.npy", numpy.array(bad, numpy.int32))
        text = fmhactl("run", "append", *files, "--seqlen-k", "lengths.npy", "--check", expect=REFUSED)
        assert "seqlen_k" in text


@pytest.mark.parametrize("wrong", ["k", "v"])
def test_a_vectorized_cache_has_its_shape_checked(fmhactl, tmp_path, wrong):
    shapes = dict(q=(2, 1, 8, 64), k=(7, 2, 8, 16, 8), v=(7, 2, 2, 64, 8))
    options = ["--kv-layout", "vectorized", "--block-table", "table.npy", "--seqlen-k", "lengths.npy"]
    numpy.save(tmp_path / "table.npy", numpy.array(TABLE, numpy.int32))
    numpy.save(tmp_path / "lengths.npy", numpy.array(LENGTHS, numpy.int32))
    files = save(tmp_path, "float16", **shapes)
    assert ": ok" in fmhactl("run", "forward", *files, *options, "--check")
    # Bytes that would not have fitted behind each other in the tensor.
    shapes[wrong] = (7, 2, 8, 16, 80) if wrong == "k" else (700, 2, 2, 64, 8)
    files = save(tmp_path, "float16", **shapes)
    fmhactl("run", "forward", *files, *options, "--check", expect=IO)


def test_page_size_must_be_that_of_the_pages(fmhactl, tmp_path):
    files = save(tmp_path, "float16", **PAGED)
    numpy.save(tmp_path / "table.npy", numpy.array(TABLE, numpy.int32))
    numpy.save(tmp_path / "lengths.npy", numpy.array(LENGTHS, numpy.int32))
    run = ["run", "forward", *files, "--seqlen-k", "lengths.npy", "--check"]
    table = ["--block-table", "table.npy"]
    assert "k.npy has pages of 16 keys" in fmhactl(*run, *table, "--page-size", 32, expect=USAGE)
    assert ": ok" in fmhactl(*run, *table, "--page-size", 16)
    assert "needs --block-table" in fmhactl(*run, "--page-size", 16, expect=USAGE)


def test_results_are_kept_or_discarded_on_purpose(fmhactl, tmp_path):
    files = save(tmp_path, q=(1, 8, 2, 16), k=(1, 8, 2, 16), v=(1, 8, 2, 16))
    text = fmhactl("run", "forward", *files, expect=USAGE)
    assert "--out" in text and "--discard" in text
    fmhactl("run", "forward", *files, "--check")
    report = json.loads(fmhactl("run", "forward", *files, "--discard", "--json", "--seconds", 0.2))
    assert len(report["runs"]) > 1
    ends = [run["end_ns"] for run in report["runs"]]
    assert ends == sorted(ends) and 0.1e9 < ends[-1] - ends[0] < 20e9
    assert min(run["kernel_ms"] for run in report["runs"]) == report["kernel_ms"]


def test_a_wrong_result_is_exit_code_1(fmhactl, tmp_path):
    """A gradient from a wrong LSE is not what the reference computes from Q, K, V."""
    files = save(tmp_path, q=(1, 20, 2, 32), k=(1, 20, 2, 32), v=(1, 20, 2, 32), do=(1, 20, 2, 32))
    save(tmp_path, o=(1, 20, 2, 32), lse=(1, 2, 20))
    text = fmhactl(
        "run", "backward", *files, "--o", "o.npy", "--lse", "lse.npy", "--dq", "a.npy",
        "--dk", "b.npy", "--dv", "c.npy", "--check", expect=FAILED,
    )  # fmt: skip
    assert "WRONG" in text and "expected" in text


# ---- verify, plan, registry ----


def test_random_problems_pass(fmhactl):
    assert ", 0 failed" in fmhactl("verify", "--cases", 100, "--seed", 20)
    assert ", 0 failed" in fmhactl("verify", "--cases", 40, "--features", "mask,window,lse,bf16")
    one = fmhactl("verify", "--seed", 20, "--only", 3)
    assert one == fmhactl("verify", "--seed", 20, "--only", 3)


def test_plan_explains_without_a_daemon(fmhactl):
    for arch in ("gfx942", "sm_90a", "x86_64_v4"):
        for shape in (
            ["--causal"],
            ["--seqlen-q", 1, "--seqlen-k", 8192, "--heads-q", 32, "--heads-k", 8],
            ["--page-size", 64, "--seqlen-q", 1],
        ):
            text = fmhactl("plan", "--arch", arch, *shape, socket="/nonexistent")
            assert "stage 1" in text and "chosen by" in text and "workspace" in text
    fmhactl("plan", "backward", "--arch", "gfx942", socket="/nonexistent")
    document = json.loads(fmhactl("plan", "--arch", "gfx942", "--json"))
    assert document["arch"] == "gfx942" and document["plan"]["stages"]
    fmhactl("plan", "--arch", "vax", expect=REFUSED)


FASTEST = [
    # Measured to be the fastest of the tiles that do not spill: kernels/gpu/NOTES.md.
    ("forward", "4 16 16 4096 4096 64", "t192x128"),
    ("forward", "4 16 16 4096 4096 128", "t128x128"),
    ("forward", "16 16 16 512 512 128", "t128x128"),
    ("forward", "2 8 8 4096 4096 256", "t128x80"),
    ("backward", "4 16 16 4096 4096 64", "t128x128"),
    ("backward", "4 16 16 4096 4096 128", "t64x128"),
    ("backward", "2 8 8 4096 4096 256", "t64x64"),
    ("forward", "16 32 8 1 8192 128", "t16x64"),
    ("forward", "1 1 1 1 131072 128", "t16x64"),
    ("forward", "8 32 8 16 16384 128", "t64x32"),
]


def plan_of_shape(fmhactl, op, shape):
    """The plan, and the name of its main kernel."""
    names = ["--batch", "--heads-q", "--heads-k", "--seqlen-q", "--seqlen-k", "--hdim"]
    options = [word for pair in zip(names, shape.split()) for word in pair]
    plan = json.loads(fmhactl("plan", op, "--arch", "sm_90a", *options, "--json"))["plan"]
    stage = next(s for s in plan["stages"] if s["family"] in ("fwd", "fwd_splitkv", "bwd_dq_dk_dv"))
    return plan, stage["kernel"]


@pytest.mark.parametrize("op, shape, kernel", FASTEST)
def test_the_formula_takes_the_tile_that_is_fastest(fmhactl, tmp_path, monkeypatch, op, shape, kernel):
    monkeypatch.setenv("FMHA_SPECS_DIR", str(fmhad.bare_specs(tmp_path)))
    plan, name = plan_of_shape(fmhactl, op, shape)
    assert f"-{kernel}x" in name
    assert (plan["n_splits"] > 0) == ("131072" in shape or "16384" in shape)
    assert ("us unsplit" in plan["split_why"]) == ("t16x64" in kernel or "t64x32" in kernel)


@pytest.mark.parametrize("op, shape, kernel", FASTEST)
def test_the_model_takes_the_tile_that_is_fastest(fmhactl, op, shape, kernel):
    assert f"-{kernel}x" in plan_of_shape(fmhactl, op, shape)[1]


@pytest.mark.parametrize("options, kernel", [
    ("--dtype e4m3", "t128x128"),
    ("--dtype e4m3 --hdim 64", "t128x192"),
    ("--dtype e4m3 --causal", "t128x128"),
    ("--dtype e4m3 --hdim 256", "t128x80"),
    ("--bias", "t128x128"),
    ("--alibi --causal", "t128x128"),
    ("--softcap 20", "t128x128"),
    ("--dropout 0.1", "t128x96"),
])
def test_plan_has_warpgroups_for_features(fmhactl, options, kernel):
    plan = json.loads(fmhactl("plan", "--arch", "sm_90a", "--seqlen", 4096, *options.split(), "--json"))["plan"]
    assert f"-gpu_wgmma-{kernel}x" in plan["stages"][0]["kernel"]


@pytest.mark.parametrize("arch, words, loop, others, said", [
    ("gfx942", "forward", "gpu_mfma", "gpu_amd", "tensor.mask_intervals: this loop does not read it"),
    ("gfx942", "backward", "gpu_mfma", "gpu_amd", "tensor.mask_intervals: this loop does not read it"),
    ("gfx1100", "forward", "gpu_wmma", "gpu_amd", "tensor.mask_intervals: this loop does not read it"),
    ("gfx1100", "backward", "gpu_wmma", "gpu_amd", "tensor.mask_intervals: this loop does not read it"),
    ("sm_90a", "forward", "gpu_wgmma", "gpu_mma", "tensor.mask_intervals: this loop does not read it"),  # decode's
    ("sm_90a", "backward", "gpu_wgmma", "gpu_mma", ""),
    ("sm_90a", "forward --softcap 20", "gpu_wgmma", "gpu_mma", ""),
    ("sm_90a", "forward --bias", "gpu_mma", "gpu_wgmma", "has masks that are data with no bias's matrix"),
    ("sm_90a", "backward --dropout 0.1", "gpu_mma", "gpu_wgmma", "has masks that are data with no dropout"),
    ("sm_90a", "backward --hdim 256", "gpu_mma", "gpu_wgmma", "has masks that are data with heads up to 128"),
    ("sm_90a", "backward --deterministic", "gpu_mma", "gpu_wgmma", "deterministic: its order is that of a band"),
])
def test_plan_of_a_mask_as_data_takes_a_loop_that_reads_it(fmhactl, arch, words, loop, others, said):
    document = fmhactl("plan", *words.split(), "--arch", arch, "--seqlen", 2048, "--mask-endpoints", 3, "--json")
    stages = [stage["kernel"] for stage in json.loads(document)["plan"]["stages"]]
    assert any(f"-{loop}" in name for name in stages) and not any(f"-{others}" in name for name in stages)
    assert said in document


def test_plan_asks_the_daemon(fmhactl):
    document = json.loads(fmhactl("plan", "--json", "--batch", 2, "--lse"))
    assert document["arch"].startswith("x86_64") or document["arch"] == "portable"
    assert "chosen by" in fmhactl("plan", "backward", "--dtype", "f32", "--deterministic")


def test_a_named_kernel_is_planned_and_run(fmhactl, tmp_path):
    shape = ["--batch", 2, "--heads", 4, "--seqlen", 300, "--hdim", 64, "--dtype", "f32"]
    fwd = json.loads(fmhactl("plan", *shape, "--json"))["selections"][0]
    other = [c["name"] for c in fwd["candidates"] if c["verdict"] == "passed over"][-1]
    named = json.loads(fmhactl("plan", *shape, "--kernel", other, "--json"))
    assert named["plan"]["stages"][0]["kernel"] == other != fwd["chosen"]
    assert named["selections"][0]["decided_by"] == "named"
    options = save(tmp_path, q=(2, 300, 4, 64), k=(2, 300, 4, 64), v=(2, 300, 4, 64))
    ran = json.loads(fmhactl("run", "forward", *options, "--check", "--kernel", other, "--json"))
    assert ran["kernels"] == [other]
    # What does not fit says why; what is no kernel, too.
    assert "data_type fp32: the problem's is bf16" in fmhactl(
        "plan", *shape[:-1], "bf16", "--kernel", other, expect=FAILED
    )
    assert "no such gfx_arch" in fmhactl(
        "run", "forward", *options, "--discard", "--kernel", other + "x", expect=REFUSED
    )


@pytest.mark.parametrize("shape", [
    "forward -b=2 -h=4 -h_k=2 -s=100 -s_k=150 -d=64 -mask=t:20,5 -lse=1",
    "forward -b=3 -h=4 -s=100,20,3 -s_k=30,120,0 -d=64 -mask=2 -lse=1 -iperm=1 -operm=1",
    "forward -mode=1 -b=3 -h=4 -s=50 -s_k=60 -s_qpad=70 -s_kpad=64 -d=32 -prec=fp16",
    "forward -b=2 -h=4 -s=1 -s_k=100 -d=64 -s_knew=1 --rope half -mask=b",
    "forward -b=2 -h=4 -s=3 -s_k=100,70 -d=64 -s_knew=3 --page-size 16 -mask=b",
    "forward -b=3 -h=4 -s=5 -s_k=90 --lengths=mixed -mode=1 -d=64 --page-size 16 --kv-lookup=indptr",
    "forward -b=2 -h=4 -s=200 -d=64 -prec=fp8 --out-type=f32 -qscale=bs",
    "forward -b=2 -h=4 -s=40 -d=64 -prec=fp8fp16 -qscale=pt -bias=a",
    "forward -b=2 -h=2 -s=60 -cache_batch_idx=1 --leftpad 4 -d=32 -sink=1",
    "forward -b=2 -h=2 -s=60 -d=32 -vlayout=c -mask=g:17,5 -init=uf",
    "forward --group -b=3 --lengths padded -s=100 --min-seqlen-q 60 -d=64",
    "backward -b=2 -h=4 -h_k=2 -s=60 -d=64 -bias=e:1 -dbias=1 --dropout 0.2 -s_randval=1 -mask=xt:32",
    "backward -b=2 -h=2 -s=60,12 -d=32 -sink=1 -dsink=1 --deterministic -prec=fp32",
    "append -b=2 -h=4 -s=10 -s_k=100 -s_knew=10 -d=64 --rope interleaved",
    "append -prec=bf16 --kv-type=int8 --descale=slot --slots -s_knew=20 --page-size 16 --rope half -d=64 -h=4",
    "forward -b=2 -h=4 -h_k=2 -s=70 -s_k=150 -d=64 -prec=fp16 --kv-type=int8 -qscale=pt -mask=b -lse=1",
    "forward -b=2 -h=4 -h_k=2 -s=1 -s_k=300 -d=59 --kv-type=i8 --descale=page --page-size 16",
    "merge -b=2 -h=4 -s=10 -d=64 --parts 3 -lse=1 -prec=fp16",
])
def test_shapes_without_files_are_made_and_checked(fmhactl, shape):
    done = json.loads(fmhactl("run", *shape.split(), "-v=1", "--warmup", 1, "--repeat", 3, "--json"))
    assert all(check["ok"] for check in done["checks"]) and len(done["runs"]) == 3
    assert all(abs(check["norm"] / check["expected_norm"] - 1) < 0.02 for check in done["checks"])
    # What it says of itself gives the same problem again.
    again = json.loads(fmhactl("run", *done["problem"].split(), "--json"))
    assert again["problem"] == done["problem"] and again["kernels"] == done["kernels"]


@pytest.mark.parametrize("mask, window", [
    ("0", "none"), ("1", "top_left causal"), ("t", "top_left causal"), ("2", "bottom_right causal"),
    ("b:7,3", "bottom_right window 7,3"), ("xt:9", "top_left window 4,4"), ("xb:-1", "bottom_right causal"),
    ("g:5,2", "top_left window 4,1"), ("bottom_right", "bottom_right window -1,-1"),
])
def test_masks_as_ck_names_them(fmhactl, mask, window):
    text = fmhactl("plan", "-s=64", f"-mask={mask}").splitlines()[0]
    assert text.endswith("bf16" if window == "none" else window)


@pytest.mark.parametrize("wrong, said", [
    ("-mask=q", "--mask"), ("-mask=t:1", "as in b:128,0"), ("-s=1,x", "-s '1,x'"), ("-bias=z", "no file is named"), ("-bias=e:3", "-bias 3"), ("-prec=fp9", "-prec"),
    ("--dtype=fp9", "--dtype"), ("-qscale=3", "-qscale"), ("-h=0", "-h 0"), ("-d=0", "-d 0"), ("-b=-1", "-b -1"), ("-s=-1", "-s"),
    ("-s=100000000000", "not in 0..2147483647"), ("-s=5,-1", "-s"), ("--causal --mask=none", "--causal"), ("--parts=0", "--parts"),
    ("-q_eff_lens=5", "-s, what the sequences take"),
])
def test_what_a_shape_cannot_be_is_usage(fmhactl, wrong, said):
    assert said in fmhactl("run", "forward", *wrong.split(), expect=USAGE)


@pytest.mark.parametrize("shape, found", [
    ("-s=0", "seqlen 0/0"), ("-s=8 -s_k=0", "seqlen 8/0"), ("-b=0", "batch 0"), ("-h=4 -h_k=-1", "heads 4/4"),
    ("-s=8 -s_k=-1", "seqlen 8/8"), ("-d=64 -d_v=-1", "hdim 64"),
])
def test_a_size_that_is_said_counts(fmhactl, shape, found):
    assert found in fmhactl("plan", *shape.split()).splitlines()[0]


@pytest.mark.parametrize("words", ["--s_randval 1", "--s_randval=1", "--s_randval"])
def test_a_switch_takes_its_value_either_way(fmhactl, words):
    done = json.loads(fmhactl("run", "forward", "-s=16", "-h=1", "-d=32", "--dropout=0.5", *words.split(), "--json"))
    assert "-s_randval=1" in done["problem"]
    assert "-s_randval" not in json.loads(fmhactl("run", "forward", "-s=16", "-h=1", "--s_randval", "0", "--json"))["problem"]


@pytest.mark.parametrize("words, said", [
    ("-b 7", "-b 7: the files have 2"), ("-h 3", "-h 3: the files have 4"), ("-s 99", "-s 99: the files have 16"),
    ("-d 8", "-d 8: the files have 32"), ("-prec bf16", "-prec bf16: the files have f32"), ("-s 4,4", "several lengths"),
    ("--lengths mixed", "--lengths"), ("-iperm 1", "--iperm"), ("--sink", "--sink"),
])
def test_options_that_files_contradict(fmhactl, tmp_path, words, said):
    files = save(tmp_path, q=(2, 16, 4, 32), k=(2, 16, 4, 32), v=(2, 16, 4, 32))
    fmhactl("run", "forward", *files, "-b", 2, "-h", 4, "-s", 16, "-d", 32, "-prec", "fp32", "--discard")
    assert said in fmhactl("run", "forward", *files, "--discard", *words.split(), expect=USAGE)


def test_help_of_a_command(fmhactl):
    assert fmhactl("help", "run") == fmhactl("run", "--help")
    assert "no command 'nope'" in fmhactl("help", "nope", expect=USAGE)


@pytest.mark.parametrize("command", ["ping", "status", "status --json", "devices --json", "plan -s 64", "archs --json", "metrics"])
def test_a_disk_that_is_full_is_said(daemon, command):
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run([fmhad.find_program("fmhactl"), *command.split()], stdout=full, stderr=subprocess.PIPE, text=True,
                              check=False, env={**os.environ, "FMHAD_SOCKET": daemon.socket})  # fmt: skip
    assert done.returncode == IO and "cannot write to stdout" in done.stderr


def test_json_of_lists(fmhactl):
    archs = {a["arch"]: a for a in json.loads(fmhactl("archs", "--json"))}
    assert archs["gfx942"]["vendor"] == "amd" and "bf16" in archs["gfx942"]["data_types"]
    assert {p["profile"] for p in json.loads(fmhactl("profiles", "--json"))} >= {"ck_default", "pytorch"}
    kernels = json.loads(fmhactl("enumerate", "--arch", "x86_64_v3", "--hdims", "64", "--profile", "ck_default", "--json"))
    assert {k["hdim_q"] for k in kernels if k["family"] in ("fwd", "bwd_dq_dk_dv")} == {64}


def test_json_of_what_is_judged_and_counted(fmhactl):
    judged = json.loads(fmhactl("verify", "--cases", 12, "--from", 3, "--json"))
    assert judged["cases"] == 12 == judged["ok"] + judged["not_supported"] and judged["ok"] > 0
    assert (judged["from"], judged["failed"], judged["failures"], judged["not_judged"]) == (3, 0, [], 0)
    samples = json.loads(fmhactl("metrics", "--json"))
    lines = [line for line in fmhactl("metrics").splitlines() if not line.startswith("#")]
    assert len(samples) == len(lines) > 100
    (up,) = [s for s in samples if s["name"] == "fmhad_device_up"]
    assert up["value"] == 1 and up["labels"]["device"] == "0" and up["labels"]["backend"] == "cpu"


def test_a_tier_that_is_not_there(fmhactl):
    assert "no tier 'nope'" in fmhactl("bench", "--tier", "nope", expect=REFUSED)


def test_a_run_that_is_late(fmhactl):
    late = fmhactl("run", "forward", "-b", 8, "-h", 32, "-s", 8192, "--timeout", "0.05", expect=LATE)
    assert "unreachable" not in late


def test_one_line_for_what_all_problems_share(daemon, tmp_path):
    (tmp_path / "list").write_text("".join(f"forward -s {n}\n" for n in range(1, 43)))
    done = subprocess.run([fmhad.find_program("fmhactl"), "warm", "--list", tmp_path / "list"], capture_output=True, text=True,
                          check=False, env={**os.environ, "FMHAD_SOCKET": daemon.socket})  # fmt: skip
    assert len(done.stderr.splitlines()) == 2 and "the same for 41 more" in done.stderr


def test_registry_sets_come_and_go(fmhactl, tmp_path):
    fmhactl("registry", "export", "--filter", "hdim_q == 128", "--out", "all.json")
    assert json.loads((tmp_path / "all.json").read_text())
    fmhactl("registry", "export", "--filter", "hdim_q ==", expect=REFUSED)
    (tmp_path / "small.json").write_text('["fwd-bf16-*"]')
    assert fmhactl("registry", "load", "small.json").startswith("set small: ")
    assert "set small: unloaded" in fmhactl("registry", "unload", "small")
    fmhactl("registry", "unload", "small", expect=REFUSED)
    # Patterns that match nothing are a mistake, and nothing is left loaded.
    (tmp_path / "typo.json").write_text('["fwd-bf61-*", "!*-h256-*"]')
    fmhactl("registry", "load", "typo.json", expect=FAILED)
    assert "not loaded" in fmhactl("registry", "unload", "typo", expect=REFUSED)
    (tmp_path / "bad.json").write_text("{")
    fmhactl("registry", "load", "bad.json", expect=REFUSED)
    (tmp_path / "empty.json").write_text("")
    fmhactl("registry", "load", "empty.json", expect=IO)
    fmhactl("registry", "import", "missing.json", expect=IO)
