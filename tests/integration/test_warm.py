# SPDX-License-Identifier: MIT
"""fmhactl warm: kernels compiled ahead, from lists and from models; and a cold machine that many start on at once."""
import json
import subprocess
import threading
import time

import fmhad
import pytest
from test_gpu_layer import compiler, make_gpu  # noqa: F401

MODEL = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "torch_dtype": "float16"}


def fmhactl(*arguments, **options):
    return subprocess.run([fmhad.find_program("fmhactl"), *arguments], capture_output=True, text=True, timeout=120, **options)


def lines_of(tmp_path, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MODEL, **changes}))
    done = fmhactl("warm", "--model", path, "--print")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_says_what_it_will_ask_for(tmp_path):
    lines = lines_of(tmp_path)
    assert all("--dtype f16 --heads-q 8 --heads-k 2 --hdim 64" in line for line in lines)
    for word in ("--group", "--page-size", "--new", "--lse"):
        assert any(word in line for line in lines), word
    both = lines_of(tmp_path, torch_dtype=None)
    assert len(both) == 2 * len(lines)
    windowed = lines_of(tmp_path, sliding_window=512, attn_logit_softcapping=50.0, head_dim=128)
    assert len(windowed) == 2 * len(lines)
    assert any("--window 511,0" in line for line in windowed)
    assert all("--hdim 128" in line and "--softcap 50" in line for line in windowed)
    assert len(lines_of(tmp_path, sliding_window=512, use_sliding_window=False)) == len(lines)
    (tmp_path / "config.json").write_text('{"text_config": %s, "torch_dtype": "bfloat16"}' % json.dumps(
        {k: v for k, v in MODEL.items() if k != "torch_dtype"}))
    done = fmhactl("warm", "--model", tmp_path / "config.json", "--print")
    assert len(done.stdout.splitlines()) == len(lines) and "--dtype bf16" in done.stdout


def test_what_is_no_model_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for text in ("{", "{}", '{"num_attention_heads": 7, "num_key_value_heads": 2, "hidden_size": 70}'):
        path.write_text(text)
        done = fmhactl("warm", "--model", path)
        assert done.returncode == 5 and str(path) in done.stderr
    assert fmhactl("warm").returncode == 2
    path.write_text("forward --heads 4\nforward --no-such-option\n")
    done = fmhactl("warm", "--list", path, "--print")
    assert done.returncode == 2 and "--no-such-option" in done.stderr


def test_kernels_of_an_arch_that_is_elsewhere(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    done = fmhactl("warm", "--model", tmp_path / "config.json", "--arch", "sm_90a")
    names = done.stdout.split()
    assert done.returncode == 0 and len(names) > 5 and len(names) == len(set(names))
    assert all(name.endswith("sm_90a") for name in names)


def test_what_was_warmed_is_there(make_gpu, compiler, tmp_path):  # noqa: F811
    daemon = make_gpu()
    problems = tmp_path / "list"
    problems.write_text("# two\nforward --heads 4 --hdim 64 --splits 1 --dtype f16\nforward --heads 4 --hdim 64 --splits 1 --dtype bf16  # the other\n")
    done = fmhactl("warm", "--socket", daemon.socket, "--list", problems)
    assert done.returncode == 0 and done.stdout.startswith("2 problems, 0 failed"), done.stderr
    n = compiler.count()
    assert n == 3, "two kernels, and the one that makes tables"
    again = fmhactl("warm", "--socket", daemon.socket, "--list", "-", input=problems.read_text())
    assert again.returncode == 0 and compiler.count() == n


def test_a_pack_is_written(make_gpu, tmp_path):  # noqa: F811
    daemon = make_gpu()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    pack = tmp_path / "plans"
    done = fmhactl("warm", "--socket", daemon.socket, "--model", tmp_path / "config.json", "--pack", pack)
    assert done.returncode == 0 and pack.read_bytes().startswith(b"FMHAPLN1"), done.stderr
    assert fmhactl("warm", "--model", tmp_path / "config.json", "--pack", pack, "--print").returncode == 2


def test_what_cannot_be_compiled_is_told(make_gpu, compiler, tmp_path):  # noqa: F811
    compiler.does("case \"$*\" in *FMHA_DTYPE=1*) echo 'error: no' >&2; exit 1;; esac; printf 'stub code' >\"$5\"")
    daemon = make_gpu()
    problems = tmp_path / "list"
    problems.write_text("forward --heads 4 --hdim 64 --dtype f16\nforward --heads 4 --hdim 64 --dtype bf16\n")
    done = fmhactl("warm", "--socket", daemon.socket, "--list", problems)
    assert done.returncode == 1 and "2 problems, 1 failed" in done.stdout
    assert "--dtype f16" in done.stderr


def test_eight_processes_on_a_cold_machine(make_gpu, compiler, tmp_path):  # noqa: F811
    """All of them ask for everything at once: each kernel is compiled once, and nobody waits for longer than that."""
    compiler.does("sleep 0.3; printf 'stub code' >\"$5\"")
    daemon = make_gpu()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    ends = []

    def warm():
        done = fmhactl("warm", "--socket", daemon.socket, "--model", tmp_path / "config.json")
        ends.append(done)

    threads = [threading.Thread(target=warm) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(done.returncode == 0 for done in ends), ends[0].stderr
    commands = compiler.runs.read_text().splitlines()
    assert len(commands) == len({line.split("-D", 1)[-1] for line in commands}) > 5
    warm()
    assert compiler.count() == len(commands)


@pytest.mark.parametrize("victims", [1, 7])
def test_those_who_die_hold_nobody_up(make_gpu, compiler, tmp_path, victims):  # noqa: F811
    compiler.does("sleep 0.2; printf 'stub code' >\"$5\"")
    daemon = make_gpu()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    command = [fmhad.find_program("fmhactl"), "warm", "--socket", daemon.socket, "--model", tmp_path / "config.json"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(8)]
    time.sleep(0.5)
    for process in processes[:victims]:
        process.kill()
    for process in processes:
        process.communicate(timeout=60)
    assert all(process.returncode == 0 for process in processes[victims:])
