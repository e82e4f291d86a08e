# SPDX-License-Identifier: MIT
"""The ways in which torch makes processes: each finds the daemon by itself, whatever its parent had open."""
import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import fmha  # noqa: E402
import fmha.torch  # noqa: E402
from test_torch import DEVICE, qkv  # noqa: E402


def result():
    q, k, v = qkv()
    o = fmha.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.cat([t.detach().cpu().flatten() for t in (o, *torch.autograd.grad(o.square().sum(), (q, k, v)))])


def work(rank, folder):
    torch.save(result(), f"{folder}/{rank}")


def test_spawned_processes(tmp_path):
    want = result()
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=3)
    for rank in range(3):
        torch.testing.assert_close(torch.load(tmp_path / str(rank)), want)


class Rows(torch.utils.data.Dataset):
    """Each item is attention over its own number."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        x = np.full((1, 3 + i, 2, 32), i, np.float32)
        return fmha.attention(x, x, x).mean().round(3), os.getpid()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader(context):
    assert Rows()[5] == (5, os.getpid())  # connected before they are made
    loader = torch.utils.data.DataLoader(Rows(), batch_size=3, num_workers=2, multiprocessing_context=context)
    values, pids = zip(*loader)
    assert torch.cat(values).tolist() == list(range(12))
    workers = set(torch.cat(pids).tolist())
    assert len(workers) == 2 and os.getpid() not in workers
    assert Rows()[7][0] == 7


RANK = """
import os, sys
import torch, torch.distributed as dist
import fmha.torch
dist.init_process_group("gloo")
device = sys.argv[1]
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device)
model = torch.nn.parallel.DistributedDataParallel(layer)
x = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(1)).to(device)
mine = x.chunk(2)[dist.get_rank()]

def gradient(model, x):
    layer.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in layer.parameters()])

with fmha.torch.replace_sdpa():
    ours = gradient(model, mine)
torch.testing.assert_close(ours, gradient(layer, x), atol=1e-5, rtol=1e-3)
sys.stdout.write(f"same {fmha.default_client().path}\\n")  # at once, not by halves
dist.destroy_process_group()
"""


def test_torchrun(tmp_path, daemon):
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                           str(tmp_path / "rank.py"), DEVICE], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n").count(f"same {daemon}") == 2
