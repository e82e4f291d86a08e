# SPDX-License-Identifier: MIT
"""Metrics, top and doctor: what is counted, who sees what, and that wrong things are named with a cure."""
import json
import os
import re
import shutil
import socket
import subprocess
import time

import fmhad
import numpy
import pytest

LINE = re.compile(r'^(fmhad_[a-z_]+)(?:\{([^}]*)\})? (\S+)$')


def fmhactl(*arguments, daemon=None, expect=0, **options):
    environment = {**os.environ, **({"FMHAD_SOCKET": daemon.socket} if daemon else {})}
    done = subprocess.run([fmhad.find_program("fmhactl"), *map(str, arguments)], capture_output=True, text=True,
                          check=False, timeout=60, env=environment, **options)  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


SUFFIXES = {"counter": ["_total"], "info": ["_info"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}


def parse(text, classic=True):
    """Prometheus' classic text or OpenMetrics, strictly, as far as we write them: {(name, labels): value}. The classic text
    names samples where OpenMetrics names families, and knows no infos."""
    values, families, family = {}, {}, None
    lines = text.splitlines()
    assert text.endswith("\n") and (lines[-1] == "# EOF") is not classic
    for line in lines if classic else lines[:-1]:
        if line.startswith("# HELP "):
            family = line.split()[2]
            assert family not in families, f"{family} is interrupted"
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == family and kind in ("counter", "gauge", "histogram") + (() if classic else ("info",)), line
            assert name.endswith("_total") is (classic and kind == "counter"), line
            families[name] = kind
        else:
            name, labels, value = LINE.match(line).groups()
            kind = families[family]
            suffixes = [""] if classic and kind != "histogram" else SUFFIXES[kind]
            assert name in [family + suffix for suffix in suffixes], line
            assert (name, labels) not in values, line
            values[name, labels] = float(value)
    return values


def run_forward(device, n=3):
    buffer = device.buffer_create(1 << 20)
    shape = (1, 16, 2, 16)
    tensors = {}
    for i, role in enumerate(("q", "k", "v", "o")):
        buffer.array("f32", shape, i * 4096)[...] = numpy.ones(shape)
        tensors[role] = {"buffer": buffer.id, "offset": i * 4096, "dtype": "f32"}
    plan = device.plan({"batch": 1, "nhead_q": 2, "nhead_k": 2, "seqlen_q": 16, "seqlen_k": 16, "hdim_q": 16,
                        "hdim_v": 16, "tensors": tensors})  # fmt: skip
    for _ in range(n):
        device.run(plan["plan"])


def metrics_of(daemon):
    """The page once its device's part is in it: a worker that has no time for an answer costs that part of a page, and nothing else."""
    page = {}

    def whole():
        page.clear()
        page.update(parse(fmhactl("metrics", daemon=daemon)))
        return ("fmhad_runs_total", 'device="0"') in page

    assert fmhad.until(whole)
    return page


def test_metrics_count_what_was_done(make_daemon):
    daemon = make_daemon()
    before = metrics_of(daemon)
    assert before["fmhad_runs_total", 'device="0"'] == 0
    with daemon.device() as device:
        run_forward(device, 5)
        with pytest.raises(Exception):
            device.run(12345)
        after = metrics_of(daemon)
    assert after["fmhad_runs_total", 'device="0"'] == 5
    family = 'device="0",family="fwd"'
    assert after["fmhad_family_runs_total", family] == 5
    # 2 products of 16 x 16 scores with 16 columns, 2 heads, 2 operations each
    assert after["fmhad_flops_total", family] == 5 * 2 * 16 * 16 * 2 * (16 + 16)
    assert after["fmhad_bytes_total", family] >= 5 * 4 * 2 * 16 * 16 * 4
    assert after["fmhad_errors_total", 'process="0",code="ENOENT"'] == 1
    assert after["fmhad_run_seconds_count", 'device="0"'] == 5
    assert 0 < after["fmhad_run_kernel_seconds_sum", 'device="0"'] <= after["fmhad_run_seconds_sum", 'device="0"']
    buckets = [value for (name, labels), value in after.items() if name == "fmhad_run_seconds_bucket"]
    assert len(buckets) == 15 and buckets == sorted(buckets) and buckets[-1] == 5
    assert after["fmhad_requests_total", None] > before["fmhad_requests_total", None]


def test_the_roof_is_what_is_configured_or_what_the_device_says(make_daemon):
    flops, moved = 2 * 16 * 16 * 2 * (16 + 16), 4 * 2 * 16 * 16 * 4
    cpu = {"backend": "cpu", "threads": 1}
    for roof, seconds in (({"roof_gflops_f32": 2}, flops / 2e9), ({"roof_gflops_f32": 2, "roof_gbs": 1}, flops / 2e9),
                          ({"roof_gflops_f32": 2000, "roof_gbs": 1}, moved / 1e9)):  # fmt: skip
        daemon = make_daemon({"devices": [{**cpu, **roof}]})
        with daemon.device() as device:
            run_forward(device, 5)
            values = metrics_of(daemon)
            census = json.loads(fmhactl("census", "--json", daemon=daemon))["shapes"][0]
        assert values["fmhad_roof_flops", 'device="0",dtype="f32",source="configured"'] == roof["roof_gflops_f32"] * 1e9
        assert values["fmhad_bytes_total", 'device="0",family="fwd"'] == 5 * moved
        assert values["fmhad_roof_seconds_total", 'device="0",family="fwd"'] == pytest.approx(5 * seconds)
        assert census["of_roof"] == pytest.approx(5e9 * seconds / census["device_ns"])
        assert census["kernel"].startswith("fwd-fp32-")
    said = {labels for name, labels in parse(fmhactl("metrics", daemon=make_daemon({"devices": [cpu]}))) if name == "fmhad_roof_flops"}
    assert {label.split("source=")[1] for label in said} <= {'"device"'}  # a machine may not tell its clock


def test_labels_are_bounded(make_daemon):
    """Nothing of users, processes or shapes is in them, however many there are."""
    daemon = make_daemon()
    names = set(metrics_of(daemon))
    devices = [daemon.device() for _ in range(5)]
    for device in devices:
        run_forward(device, 1)
    more = set(metrics_of(daemon))
    assert {labels for name, labels in more - names} == {'device="0",family="fwd"'}
    for device in devices:
        device.close()


def test_metrics_replace_their_file(make_daemon, tmp_path):
    daemon = make_daemon()
    out = tmp_path / "fmhad.prom"
    out.write_text("old")
    assert fmhactl("metrics", "--out", out, daemon=daemon) == ""
    parse(out.read_text())
    assert os.listdir(tmp_path) == ["fmhad.prom"]
    fmhactl("metrics", "--out", tmp_path / "missing/fmhad.prom", daemon=daemon, expect=5)


def get(path, request=b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(path)
        answer = b""
        try:
            sock.sendall(request)
            while part := sock.recv(65536):
                answer += part
        except (ConnectionResetError, BrokenPipeError):
            pass  # it was hung up on before all of the request was read
    return answer.decode()


ACCEPTED = [
    ("", True),
    ("Accept: */*\r\n", True),
    ("Accept: text/plain\r\n", True),
    ("Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n", False),
    ("accept: text/plain;version=0.0.4;q=0.5,Application/OpenMetrics-Text;version=1.0.0;q=0.75\r\n", False),
    ("Accept: application/openmetrics-text;q=0, text/plain;q=0.1\r\n", True),
]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (Debian's prometheus) is not installed")
def test_promtool_takes_the_metrics(make_daemon):
    daemon = make_daemon()
    with daemon.device() as device:
        run_forward(device, 2)
        text = fmhactl("metrics", daemon=daemon)
    for wrong in ("", "# TYPE x info\n"):
        done = subprocess.run(["promtool", "check", "metrics"], input=text + wrong, capture_output=True, text=True, check=False)
        assert (done.returncode == 0 and done.stdout + done.stderr == "") is not bool(wrong), done.stdout + done.stderr


def test_metrics_over_http(make_daemon, tmp_path):
    path = str(tmp_path / "metrics")
    daemon = make_daemon({"metrics_socket": path})
    with daemon.device() as device:
        run_forward(device, 2)
        for accept, classic in ACCEPTED:
            request = f"GET /metrics HTTP/1.1\r\nHost: x\r\n{accept}X: application/openmetrics-text\r\n\r\n".encode()
            head, body = get(path, request).split("\r\n\r\n", 1)
            assert head.startswith("HTTP/1.0 200 OK\r\n") and f"Content-Length: {len(body)}" in head
            assert ("text/plain; version=0.0.4" if classic else "application/openmetrics-text; version=1.0.0") in head, accept
            values = parse(body, classic)
            assert values["fmhad_runs_total", 'device="0"'] == 2
            assert values.keys() == metrics_of(daemon).keys()
    assert get(path, b"GET / HTTP/1.1\r\n\r\n").startswith("HTTP/1.0 404")
    assert get(path, b"GET /metricsx HTTP/1.1\r\n\r\n").startswith("HTTP/1.0 404")
    assert get(path, b"POST /metrics HTTP/1.1\r\n\r\n").startswith("HTTP/1.0 405")
    assert get(path, b"x" * 5000) == ""
    assert oct(os.stat(path).st_mode)[-3:] == "600"
    # Callers that say nothing keep the others out for their deadline at most, and cost the daemon nothing else.
    silent = []
    for _ in range(20):
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        silent[-1].connect(path)
    with daemon.client() as client:
        client.ping()
    assert fmhad.until(lambda: "200 OK" in get(path))
    for sock in silent:
        sock.close()
    fds = daemon.fd_counts()
    for _ in range(50):
        get(path)
    assert daemon.has_no_more_than(fds)
    assert daemon.stop() == 0 and not os.path.exists(path)


def test_top_shows_rates_and_sessions(make_daemon):
    daemon = make_daemon()
    with daemon.device() as device:
        run_forward(device, 1)
        top = subprocess.Popen([fmhad.find_program("fmhactl"), "top", "--json", "--interval", "1"],
                               stdout=subprocess.PIPE, text=True, env={**os.environ, "FMHAD_SOCKET": daemon.socket})  # fmt: skip
        while top.poll() is None:
            run_forward(device, 20)
            time.sleep(0.05)
        screen = json.loads(top.communicate(timeout=30)[0])
        plain = fmhactl("top", "--interval", "0.1", "--count", "2", daemon=daemon)
    assert screen["devices"][0]["runs_per_s"] > 0 and screen["devices"][0]["tflops_per_s"] > 0
    assert [session["pid"] for session in screen["sessions"]] == [os.getpid()]
    session = screen["sessions"][0]
    assert session["runs_per_s"] > 0 and session["tflops_per_s"] > 0 and session["gb_per_s"] > 0
    assert session["device_time"] > 0 and session["shape"].startswith("f.b.f32.h16x16.b1h2x2.q16") and session["shape"] in plain
    assert "\033" not in plain and plain.count("fmhad ready") == 2 and str(os.getpid()) in plain


def test_top_shows_a_run_that_has_not_ended(make_daemon):
    daemon = make_daemon()
    environment = {**os.environ, "FMHAD_SOCKET": daemon.socket}
    with subprocess.Popen([fmhad.find_program("fmhactl"), "run", "forward", "-h", "16", "-s", "65536", "-d", "64", "--timeout", "600"],
                          env=environment, stderr=subprocess.DEVNULL) as runner:  # fmt: skip
        try:
            assert fmhad.until(lambda: daemon.status()["devices"][0]["worker"]["runs"]["running_ns"] > 0, timeout=60)
            screen = json.loads(fmhactl("top", "--json", "--interval", "0.5", daemon=daemon))
        finally:
            runner.kill()
    device, session = screen["devices"][0], screen["sessions"][0]
    assert device["runs_per_s"] == 0 and device["device_time"] > 0.2
    assert session["device_time"] > 0.2 and ".q65536" in session["shape"]


def test_a_trace_shows_each_run(make_daemon, tmp_path):
    daemon = make_daemon()
    with daemon.device() as device:
        assert json.loads(device.call_json("trace"))["events"] == []
        before = time.monotonic_ns()
        run_forward(device, 4)
        answer = json.loads(device.call_json("trace"))
        assert answer["lost"] == 0 and len(answer["events"]) == 4
        for event in answer["events"]:
            assert event["kind"] == "run" and event["pid"] == os.getpid() and event["kernel"].startswith("fwd-")
            assert before <= event["arrived_ns"] <= event["started_ns"] <= event["ended_ns"] <= event["answered_ns"]
            before = event["arrived_ns"]
        assert json.loads(device.call_json("trace"))["events"] == []
        # Nobody records for one who has gone, and who comes later begins with nothing.
        run_forward(device, 1)
        with daemon.device() as other:
            assert json.loads(other.call_json("trace"))["events"] == []
        out = tmp_path / "T.json"
        watcher = subprocess.Popen([fmhad.find_program("fmhactl"), "trace", "--seconds", "1", "--out", out],
                                   stdout=subprocess.PIPE, text=True, env={**os.environ, "FMHAD_SOCKET": daemon.socket})  # fmt: skip
        while watcher.poll() is None:
            run_forward(device, 3)
            time.sleep(0.1)
        assert "0 events were lost" in watcher.communicate()[0]
    spans = json.loads(out.read_text())["traceEvents"]
    assert len(spans) >= 3 and len(spans) % 3 == 0
    assert {span["name"] for span in spans} == {"queue", "kernel", "answer"}
    assert {span["args"]["client_pid"] for span in spans} == {os.getpid()}
    assert all(span["ph"] == "X" and span["dur"] >= 0 for span in spans)


def test_a_trace_shows_stages(make_daemon, tmp_path):
    """Backward has several; fmhactl writes each within its run's kernel."""
    daemon = make_daemon({"devices": [{"backend": "cpu", "threads": 2}]})
    out = tmp_path / "T.json"
    watcher = subprocess.Popen([fmhad.find_program("fmhactl"), "trace", "--seconds", "2", "--out", out],
                               stdout=subprocess.PIPE, text=True, env={**os.environ, "FMHAD_SOCKET": daemon.socket})  # fmt: skip
    while watcher.poll() is None:
        fmhactl("run", "backward", "-b", "1", "-h", "2", "-s", "64", "-d", "32", daemon=daemon)
    watcher.communicate()
    spans = json.loads(out.read_text())["traceEvents"]
    kernels = [span for span in spans if span["name"] == "kernel" and span["args"]["kernel"].startswith("bwd_dq_dk_dv-")]
    assert kernels
    for kernel in kernels:
        stages = [span for span in spans if span["name"].startswith("bwd_") and span["tid"] == kernel["tid"]
                  and kernel["ts"] - 0.002 <= span["ts"] <= kernel["ts"] + kernel["dur"]]  # fmt: skip
        assert [stage["name"] for stage in stages][:2] == ["bwd_dot_do_o", "bwd_dq_dk_dv"]
        assert sum(stage["dur"] for stage in stages) <= kernel["dur"] + 0.01


def test_others_runs_are_for_administrators(make_daemon):
    if fmhad.NO_OTHER_USERS:
        pytest.skip(fmhad.NO_OTHER_USERS)
    daemon = make_daemon(open_to_all=True)
    script = (
        "import json, os, sys; os.setuid(int(sys.argv[3])); sys.path[:0] = sys.argv[1:2]; import fmha_wire\n"
        "with fmha_wire.Client.connect(sys.argv[2]) as client, client.open_device(0) as device:\n"
        "    device.call_json('trace'); print('ready', flush=True); input()\n"
        "    print(len(json.loads(device.call_json('trace'))['events']))"
    )

    def seen(uid):
        watcher = subprocess.Popen(["/usr/bin/python3", "-c", script, str(fmhad.ROOT / "tests/lib"), daemon.socket, str(uid)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert watcher.stdout.readline() == "ready\n"
        with daemon.device() as device:
            run_forward(device, 2)
        return int(watcher.communicate("\n", timeout=20)[0])

    assert seen(0) == 2 and seen(12345) == 0


def test_doctor_names_what_is_wrong_and_the_cure(make_daemon, tmp_path):
    daemon = make_daemon()
    findings = {item["check"]: item for item in json.loads(fmhactl("doctor", "--json", daemon=daemon))}
    assert findings["daemon"]["verdict"] == findings["device 0"]["verdict"] == findings["specs"]["verdict"] == "ok"
    assert all("advice" in item for item in findings.values() if item["verdict"] == "WRONG")
    text = fmhactl("doctor", "--socket", tmp_path / "nothing", expect=1)
    assert re.search(r"^WRONG +daemon .*nothing.*\n +-> .*systemctl start", text, re.MULTILINE)
    broken = make_daemon({"devices": [{"backend": "cpu", "cpu_level": "x86_64_v9"}, {"backend": "cpu", "threads": 1}]})
    text = fmhactl("doctor", daemon=broken, expect=1)
    assert re.search(r"^WRONG +device 0 +failed: .*x86_64_v9.*\n +-> ", text, re.MULTILINE)
    assert re.search(r"^ok +device 1 ", text, re.MULTILINE)


@pytest.mark.parametrize("device", [0, 1])
def test_doctor_tries_a_device_in_its_worker(make_daemon, device):
    """Every family against the reference, and runs that race; on the fake, which works on the CPU, as well."""
    daemon = make_daemon({"devices": [{"backend": "cpu"}, {"backend": "fake"}]})
    said = json.loads(fmhactl("doctor", "--json", "--device", device, "--seconds", 0.2, "--timeout", 60, daemon=daemon))
    found = {item["check"]: item for item in said}
    for name in ("forward bf16", "odd tails", "splits", "page indices", "append, pages", "merge", "backward bf16", "e4m3, one sign",
                 "shared memory", "races"):
        assert found[name]["verdict"] == "ok", found[name]
    assert "of what is allowed" in found["tails"]["found"] and "bwd_dq_dk_dv" in found["backward f32"]["found"]
    assert int(found["races"]["found"].split()[0]) >= 4 and found["fences"]["verdict"] == "ok"
    assert re.search(r"^WRONG +tried +ENOENT", fmhactl("doctor", "--device", 7, daemon=daemon, expect=1), re.MULTILINE)
