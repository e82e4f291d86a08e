# SPDX-License-Identifier: MIT
"""fmha.torch.cp: sequences that processes share, over gloo. What the ranks compute is cp_cases.py."""
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import torch.distributed as dist  # noqa: E402

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)
import fmha  # noqa: E402
from fmha.torch import cp  # noqa: E402
from fmha.torch.cp import pieces, shares as _shares  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent


def environment():
    return {**os.environ, "FMHAD_SOCKET": fmha.default_client().path, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def launched(n, program, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), str(program), *map(str, arguments)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.parametrize("n", [2, 3, 4])
def test_equals_one_process(n, tmp_path):
    """Every schedule and feature, within the type's error of float32 of the whole."""
    launched(n, HERE / "cp_cases.py", tmp_path)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(n)]
    assert len(results[0]) >= {2: 70, 3: 45, 4: 115}[n]
    wrong = [(rank, r["case"], r["kind"], name, error, allowed) for rank, found in enumerate(results) for r in found
             for name, (error, allowed) in r["errors"].items() if not error <= allowed]
    assert not wrong, wrong[:10]
    exact = [r for r in results[0] if r["kind"] in ("all_gather", "a2a") and r["case"] == "causal"]
    assert exact and all(r["errors"]["o"][0] == 0 for r in exact)  # float32: these two merge nothing


MANNERS = """
import sys, torch, torch.distributed as dist
import fmha
from fmha.torch import cp
dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
q, k, v = (torch.randn(1, 128, 4, 32, requires_grad=True) for _ in range(3))

def twice(kind, **said):
    found = []
    for _ in range(2):
        o = cp.attention(q, k, v, causal=True, cp_comm_type=kind, **said)
        found.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v))))
    return all(map(torch.equal, *found))

assert all(twice(kind, deterministic=True) for kind in ("all_gather", "a2a", "p2p"))
torch.manual_seed(rank)  # ranks that draw for themselves would draw differently
o = cp.attention(q, k, v, causal=True, dropout_p=0.5)
ends = torch.stack([o.detach().abs().sum()])
assert not twice("all_gather", dropout_p=0.5)
torch.manual_seed(rank)
again = cp.attention(q, k, v, causal=True, dropout_p=0.5)
assert torch.equal(o, again)

from fmha.flash_attn import flash_attn_with_kvcache
torch.manual_seed(3)  # decoding: each rank has a share of the cache, of its own length
q1, cache_k, cache_v = torch.randn(2, 1, 8, 64), torch.randn(2, 300, 2, 64), torch.randn(2, 300, 2, 64)
used = torch.tensor([290, 77], dtype=torch.int32)
want, want_lse = flash_attn_with_kvcache(q1, cache_k, cache_v, cache_seqlens=used, return_softmax_lse=True)
at = 100 * rank
mine = (used - at).clamp(0, 100 if rank + 1 < n else 300).int()
part, part_lse = flash_attn_with_kvcache(q1, cache_k[:, at:], cache_v[:, at:], cache_seqlens=mine, return_softmax_lse=True)
assert part_lse[1].isinf().all() == (rank > 0)  # the second sequence ends on the first rank
o1, lse1 = cp.merge(part, part_lse)
torch.testing.assert_close(o1, want)
torch.testing.assert_close(lse1, want_lse)
assert not torch.allclose(part[0], want[0])
torch.manual_seed(rank)

def refused(field, *tensors, **said):
    try:
        cp.attention(*(tensors or (q, k, v)), **said)
    except fmha.FmhaError as error:
        assert error.field == field, (error.field, str(error))
        return
    raise AssertionError(f"{field}: not refused")

refused("cp_comm_type", cp_comm_type="ring")
refused("tensor.k", q, k[:, :64], v)
refused("tensor.q", q[0], k[0], v[0])
refused("shares", shares=cp.head_tail(256 * n, n + 1))
refused("tensor.q", shares=cp.head_tail(64 * n, n))
refused("nhead_k", q, k[:, :, :3], v[:, :, :3])
refused("nhead_q", q[:, :, :1], k[:, :, :1], v[:, :, :1], cp_comm_type="a2a")
refused("group", cp_comm_type="a2a+p2p")
refused("chunks", chunks=3)
refused("dropout_p", q[:, :100], k[:, :100], v[:, :100], dropout_p=0.1, causal=True)
try:
    torch.autograd.grad(torch.autograd.grad(cp.attention(q, k, v).sum(), q, create_graph=True)[0].sum(), q)
except fmha.NotSupportedError:
    pass
else:
    raise AssertionError("second derivatives: not refused")
with torch.autocast("cpu", torch.bfloat16):
    assert cp.attention(q, k, v).dtype == torch.bfloat16
mesh = dist.device_mesh.init_device_mesh("cpu", (n,)) if hasattr(dist, "device_mesh") else None
assert torch.equal(cp.attention(q, k, v, causal=True, group=mesh), cp.attention(q, k, v, causal=True))
del mesh
dist.barrier()

import weakref
held, group = [cp.attention(q, k, v, cp_comm_type=kind) for kind in ("all_gather", "a2a", "p2p")], weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None  # a group that graphs kept would end the process with it, now and then: its threads are not waited for
for o in held:
    try:
        o.sum().backward()
    except fmha.FmhaError as error:
        assert error.field == "group", error
    else:
        raise AssertionError("a group that is no more: not refused")
print("good", rank)
"""


def test_manners(tmp_path):
    """Determinism, seeds that ranks agree on, and sentences for what does not fit."""
    program = tmp_path / "manners.py"
    program.write_text(MANNERS)
    assert launched(2, program).count("good") == 2


ENDLESS = """
import os, sys, torch, torch.distributed as dist
from fmha.torch import cp
import datetime
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
q, k, v = (torch.randn(1, 512, 4, 32, requires_grad=True) for _ in range(3))
while True:
    cp.attention(q, k, v, causal=True, cp_comm_type=sys.argv[1]).sum().backward()
    print(dist.get_rank(), flush=True)
"""


@pytest.mark.parametrize("kind", ["all_gather", "a2a", "p2p"])
def test_a_rank_that_dies(kind, tmp_path):
    """The others get an error in bounded time, and the daemon serves on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    for rank in range(3 if kind != "a2a" else 2):
        said = {"RANK": str(rank), "WORLD_SIZE": "3" if kind != "a2a" else "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen([sys.executable, "-c", ENDLESS, kind], env=environment() | said, stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, text=True))
    try:
        for rank in ranks:
            assert rank.stdout.readline()  # it has computed something
        ranks[-1].send_signal(signal.SIGKILL)
        start = time.monotonic()
        for rank in ranks[:-1]:
            _, said = rank.communicate(timeout=60)
            assert rank.returncode not in (0, None) and "Error" in said, said[-2000:]
        assert time.monotonic() - start < 60
        x = torch.randn(1, 64, 2, 32)
        assert fmha.attention(x, x, x).isfinite().all()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


# ---- who has what ----


def brute(documents, causal, window, begin, end):
    """How many keys rows see, one by one."""
    total = 0
    for first, last in zip(documents, documents[1:]):
        for i in range(max(first, begin), min(last, end)):
            left, right = window
            low = first if left < 0 else max(first, i - left)
            high = i if causal else last - 1 if right < 0 else min(last - 1, i + right)
            total += high - low + 1
    return total


def test_work_is_counted():
    draw = random.Random(3)
    for _ in range(60):
        documents = (0, *sorted(draw.choices(range(1, 90), k=draw.randint(0, 5))), 90)
        causal = draw.random() < 0.5
        window = (draw.choice((-1, 0, 3, 40)), -1 if causal else draw.choice((-1, 0, 5, 60)))
        begin = draw.randint(0, 89)
        end = draw.randint(begin, 90)
        assert _shares.visible(documents, begin, end, causal, window) == brute(documents, causal, window, begin, end)


def lengths(draw, n, most):
    found = [0]
    for _ in range(n):
        found.append(found[-1] + int(min(most, draw.paretovariate(1.1) * most / 40)) + 1)
    return found


@pytest.mark.parametrize("n", [2, 3, 8, 64])
@pytest.mark.parametrize("equal", [False, True])
def test_work_is_spread(n, equal):
    draw = random.Random(n)
    documents = lengths(draw, 40 * n, 8192)
    shares = _shares.checked(cp.balanced(documents, n, equal=equal))
    work, rows = shares.work(), [shares.rows(r) for r in range(n)]
    if equal:
        assert max(rows) - min(rows) <= 1
    else:
        assert max(work) <= 1.05 * sum(work) / n
    one = cp.balanced(32 * 1024 * n, n)
    assert max(one.work()) <= 1.01 * sum(one.work()) / n


def test_take_and_put():
    x = torch.arange(2 * 50 * 3).view(2, 50, 3)
    for shares in (cp.head_tail(50, 4), cp.contiguous(50, 3), cp.balanced(50, 2)):
        assert torch.equal(shares.put([shares.take(x, r) for r in range(len(shares.ranks))]), x)
    with pytest.raises(fmha.InvalidError):
        cp.head_tail(49, 2).take(x, 0)
    with pytest.raises(fmha.InvalidError):
        _shares.checked(cp.Shares((((0, 5),), ((4, 10),)), (0, 10)))
    with pytest.raises(fmha.InvalidError):
        cp.head_tail((0, 5, 3), 2)


def seen_by(piece, i, j):
    n_q, n_k = piece.q1 - piece.q0, piece.k1 - piece.k0
    at = j - i if piece.top else j - i - (n_k - n_q)
    return (piece.left < 0 or at >= -piece.left) and (piece.right < 0 or at <= piece.right)


def test_pieces_cover_what_is_seen_once():
    draw = random.Random(5)
    for _ in range(300):
        total = draw.randint(4, 60)
        documents = (0, *sorted(draw.sample(range(1, total), min(3, total - 1) if draw.random() < 0.6 else 0)), total)
        left, right = draw.choice((-1, 0, 4, 15)), draw.choice((-1, 0, 0, 6))
        cuts = [0, *sorted(draw.sample(range(1, total), min(5, total - 1))), total]
        intervals = list(zip(cuts, cuts[1:]))
        rows = _shares.held(sorted(draw.sample(intervals, draw.randint(1, len(intervals)))))
        keys = rows if draw.random() < 0.3 else _shares.held(draw.sample(intervals, draw.randint(1, len(intervals))))
        count = {}
        for call in pieces.calls(pieces.pieces(documents, rows, keys, left, right), True, total, total):
            for p in call.pieces:
                for i in range(p.q1 - p.q0):
                    for j in range(p.k1 - p.k0):
                        if seen_by(p, i, j):
                            count[p.q0 + i, p.k0 + j] = count.get((p.q0 + i, p.k0 + j), 0) + 1
            for before, after in zip(call.pieces, call.pieces[1:]):
                assert before.q1 <= after.q0 and before.k1 <= after.k0
        want = {}
        for q in rows:
            for k in keys:
                for i in range(q.begin, q.end):
                    for j in range(k.begin, k.end):
                        same = max(d for d in documents[:-1] if d <= i) <= j < min(d for d in documents[1:] if d > i)
                        if same and (left < 0 or j >= i - left) and (right < 0 or j <= i + right):
                            want[q.at + i - q.begin, k.at + j - k.begin] = 1
        assert count == want


def losses(text):
    return [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("step")]


def test_the_example_of_the_page(tmp_path):
    """Four processes train to the losses of one."""
    page = (HERE.parents[2] / "docs/scale.md").read_text()
    program = tmp_path / "train.py"
    program.write_text(page.split("```python\n")[1].split("```")[0])
    sizes = [(8192, 8192, 4)] + [(65536, 2048, 2)] * ("FMHA_NIGHTLY" in os.environ)
    for size in sizes:
        alone = subprocess.run([sys.executable, program, *map(str, size)], env=environment(), capture_output=True, text=True, timeout=600)
        assert alone.returncode == 0, alone.stderr[-4000:]
        want = losses(alone.stdout)
        assert len(want) == size[2] and want[-1] < want[0]
        assert losses(launched(4, program, *size)) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("n", [2, 4])
def test_the_model_of_schedules(n, tmp_path):
    """With messages and kernels that take as long as a table says, steps take what the model says, within 5 %."""
    launched(n, HERE / "cp_delays.py", tmp_path)
    found = json.loads((tmp_path / "0.json").read_text())
    assert len(found) == {2: 12, 4: 20}[n]
    wrong = [f"{name}: {said:.3f} s, measured {measured:.3f}" for name, said, measured in found if not abs(said / measured - 1) <= 0.05]
    assert not wrong, wrong


def test_a_plan():
    """More ranks never slow the best plan down by more than their messages, and a link that costs nothing leaves kernels alone."""
    from fmha.torch.cp import model

    free = model.Machine("free", model.Link(0, 0), model.Link(0, 0), ((1e12, 1e-2),), ((1e12, 1e-2),), 1e30)
    job = model.Job(65536)
    for ranks in (2, 8, 64):
        for c in model.choices(free, job, ranks):
            assert c.total == pytest.approx((job.forward_flops() + job.backward_flops()) / ranks * 1e-14)
    kinds = {c.kind for c in model.choices(model.H200, job, 16)}
    assert kinds == {"all_gather", "a2a", "p2p", "a2a+p2p", "a2a+all_gather"}
    assert not [c for c in model.choices(model.H200, job, 256, ["a2a"])]  # 64 heads
    near, far = (min(c.total for c in model.choices(model.H200, job, 16, [kind])) for kind in ("a2a+all_gather", "p2p"))
    assert near < far
    one = subprocess.run([sys.executable, "-m", "fmha.torch.cp", "plan", "--ranks", "1024", "--hosts", "128", "--seqlen", "1e6"],
                         env=environment(), capture_output=True, text=True, timeout=120)
    assert one.returncode == 0 and "a2a+p2p" in one.stdout, one.stderr
