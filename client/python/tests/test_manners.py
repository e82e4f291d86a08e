# SPDX-License-Identifier: MIT
"""What people do to programs: Ctrl-C, daemons that end, daemons that are somebody else's."""
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import time

import fmha
import numpy as np
import pytest

LONG = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
import numpy as np, fmha
rng = np.random.default_rng(1)
small = [rng.standard_normal((1, 64, 2, 64), dtype=np.float32) for _ in range(3)]
want = fmha.attention(*small)
q, k, v = (rng.standard_normal((1, int(sys.argv[1]), 16, 128), dtype=np.float32) for _ in range(3))
"""


def run(program, *arguments, **environment):
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment})


INTERRUPTED = LONG + """
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.perf_counter()
try:
    fmha.attention(q, k, v)
    sys.exit("it was too short to be interrupted")
except KeyboardInterrupt:
    print(time.perf_counter() - start - 1.0)
np.testing.assert_array_equal(fmha.attention(*small), want)
"""


def test_ctrl_c_ends_a_long_call_at_once():
    done = run(INTERRUPTED, "15000")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5, "seconds that the call went on"


HANDLED = LONG + """
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(time.perf_counter()))
signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
one = fmha.attention(q, k, v)
signal.setitimer(signal.ITIMER_REAL, 0)
assert seen, "no signal during the call"
np.testing.assert_array_equal(one, fmha.attention(q, k, v))
"""


def test_a_handler_that_returns_disturbs_nothing():
    done = run(HANDLED, "2500")
    assert done.returncode == 0, done.stderr


ELSEWHERE = LONG + """
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
done = []
worker = threading.Thread(target=lambda: done.append(fmha.attention(q, k, v)))
worker.start()
try:
    time.sleep(60)
    sys.exit("no signal came")
except KeyboardInterrupt:
    worker.join()
assert done and np.isfinite(done[0]).all()
"""


def test_ctrl_c_is_the_main_threads():
    done = run(ELSEWHERE, "2500")
    assert done.returncode == 0, done.stderr


def daemons_pid():
    info = fmha.default_client()._info()
    return info.daemon_pid


RESTARTED = """
import os, signal, time
import numpy as np, fmha
x = np.ones((1, 5, 2, 16), np.float32)
first = fmha.start()
fmha.attention(x, x, x)
assert fmha.start() == first  # it runs: nothing new
pid = fmha.default_client()._info().daemon_pid
os.kill(pid, signal.SIGKILL)
deadline = time.monotonic() + 20
while True:
    try:
        fmha.Client(first).close()
    except fmha.UnreachableError:
        break
    assert time.monotonic() < deadline
    time.sleep(0.01)
try:
    fmha.attention(x, x, x)
    raise SystemExit("nobody computed that")
except fmha.UnreachableError as error:
    assert "fmha.start()" in str(error) or "went away" in str(error) or error.code in ("ECONN", "EDEVICE"), error
second = fmha.start()
assert second != first and os.environ["FMHAD_SOCKET"] == second
np.testing.assert_array_equal(fmha.attention(x, x, x), x)
assert fmha.default_client()._info().daemon_pid != pid
assert not os.path.exists(os.path.dirname(first))
"""


def test_a_daemon_that_ended_is_started_anew():
    environment = {k: v for k, v in os.environ.items() if k != "FMHAD_SOCKET"}
    done = subprocess.run([sys.executable, "-c", RESTARTED], capture_output=True, text=True, timeout=120,
                          env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr


REFUSED = """
import fmha
try:
    fmha.start(config={"compile": {"jobs": "many"}}, timeout=100)
except fmha.UnreachableError as error:
    print(error)
"""


def test_a_daemon_that_ends_at_its_start_is_told_at_once():
    """With the end of its log, not after all the time that it was given."""
    environment = {k: v for k, v in os.environ.items() if k != "FMHAD_SOCKET"}
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=50,
                          env={**environment, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert "compile.jobs: must be" in done.stdout, done.stdout + done.stderr


FORBIDDEN = """
import os, sys
import numpy as np
os.setgid(65534), os.setuid(65534)
import fmha
x = np.ones((1, 5, 2, 16), np.float32)
try:
    print(fmha.attention(x, x, x).shape, os.environ.get("FMHAD_SOCKET"))
except fmha.NotAllowedError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(os.getuid() != 0 or "FMHA_TEST_SOCKET" in os.environ, reason="needs root, to become somebody else")
def test_a_machines_daemon_that_one_may_not_use(tmp_path, daemon):
    """FMHA_AUTOSTART=1 starts one of one's own; without, the error names both ways."""
    if any(not folder.stat().st_mode & stat.S_IXOTH for folder in pathlib.Path(fmha.__file__).parents):
        pytest.skip("other users cannot reach this tree")
    shut = tmp_path / "shut"
    shut.mkdir()
    (shut / "fmhad.sock").symlink_to(daemon)
    shut.chmod(0o700)
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and folder != folder.parent and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "own").mkdir()
    (tmp_path / "own").chmod(0o777)
    said = {"FMHAD_SOCKET": str(shut / "fmhad.sock"), "TMPDIR": str(tmp_path / "own"), "HOME": str(tmp_path / "own")}
    refused = run(FORBIDDEN, **said)
    assert refused.stdout.startswith("refused:") and "fmha.start()" in refused.stdout and "FMHA_AUTOSTART" in refused.stdout, refused
    helped = run(FORBIDDEN, **said, FMHA_AUTOSTART="1")
    assert helped.stdout.startswith("(1, 5, 2, 16)") and str(tmp_path / "own") in helped.stdout, helped


def test_threads_wait_undisturbed_by_the_main_threads_signals():
    """Several waits on one connection, while the main one asks for signals."""
    x = np.random.default_rng(1).standard_normal((1, 3000, 4, 64), dtype=np.float32)
    want, found = fmha.attention(x, x, x), []
    threads = [threading.Thread(target=lambda: found.append(fmha.attention(x, x, x))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        np.testing.assert_array_equal(fmha.attention(x, x, x), want)
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(np.array_equal(f, want) for f in found)
