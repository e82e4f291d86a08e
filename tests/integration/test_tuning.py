# SPDX-License-Identifier: MIT
"""Measuring kernels, and what is remembered of it: over deaths of the worker and of the daemon, among
workers of one model, on a disk that is damaged, full or not ours."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy
import pytest

import fmha_wire
import fmhad

sys.path.append(str(fmhad.ROOT / "tests/bench"))
import fit_model  # noqa: E402
import selection  # noqa: E402

DECODE = {"batch": 1, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 1, "seqlen_k": 1024, "hdim_q": 64,
          "hdim_v": 64}
SMALL = {"batch": 1, "nhead_q": 2, "nhead_k": 2, "seqlen_q": 64, "seqlen_k": 64, "hdim_q": 64,
         "hdim_v": 64}


def problem(sizes=None, **options):
    tensors = {role: {"buffer": i + 1, "dtype": "f32"} for i, role in enumerate("qkvo")}
    return {**(sizes or SMALL), **options, "tensors": tensors}


def tune(device, sizes=None, **options):
    return device.call("tune", {"problem": problem(sizes), **options}, timeout=60)


def plans_by(daemon):
    """How many plans were made, by what was known of their kernels."""
    lines = [line for line in fmhactl("metrics", FMHAD_SOCKET=daemon.socket).splitlines()
             if line.startswith("fmhad_plans_total")]
    return {line.split('by="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def results(device):
    """(kernel, shape, splits) -> microseconds"""
    document = json.loads(device.call_json("registry_export", {}))
    return {(kernel["name"], r["shape"], r["splits"]): r["us"]
            for kernel in document["kernels"] for r in kernel.get("tuned", [])}


def plan(device, sizes=None, roles=("q", "k", "v", "o"), kernels=()):
    sizes = sizes or SMALL
    buffer = device.buffer_create(5 << 20)
    tensors = {role: {"buffer": buffer.id, "offset": i << 20, "dtype": "f32"}
               for i, role in enumerate(roles)}
    return device.call("plan", {"problem": {**sizes, "tensors": tensors}, "kernels": list(kernels)})


def chosen(planned):
    """The main kernel, and into how many stages the plan is cut."""
    return planned["stages"][0]["kernel"], len(planned["stages"])


def claim(device, kernel, shape, us, splits=0):
    """Has the daemon believe that somebody measured it, now."""
    document = json.loads(device.call_json("registry_export", {"filter": "hdim_q == 32"}))
    document["kernels"] = [{"name": kernel, "tuned": [
        {"shape": shape, "splits": splits, "us": us, "when": int(time.time()) + 10}]}]
    return device.call_with_text("registry_import", json.dumps(document))


def slowest(device, sizes=None):
    """The kernel of the plan's first stage that was measured as the slowest, and the word."""
    shape = tune(device, sizes)["shape"]
    of_shape = {key: us for key, us in results(device).items() if key[1] == shape}
    kernel, _, splits = max(of_shape, key=of_shape.get)
    return kernel, shape, splits


def as_user(uid, function):
    """What the function returns in a process of that user."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fmhad.become(uid)
            os.write(theirs, json.dumps(function()).encode())
        except BaseException as error:  # pylint: disable=broad-except
            os.write(theirs, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def daemon_of(state, **config):
    return fmhad.Daemon({"tuning": {"state": str(state), **config.pop("tuning", {})}, **config})


def reload_tuning(daemon, **keys):
    daemon.config["tuning"].update(keys)
    (daemon.directory / "fmhad.json").write_text(json.dumps(daemon.config))
    daemon.process.send_signal(signal.SIGHUP)


def files(state):
    """Those that stand there: one that is being written is gone by its first name in a moment."""
    found = {}
    for path in state.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                found[path.name] = path.read_text()
    return found


def results_file(state):
    """Not the settings, nor who the owner is."""
    (path,) = (path for path in state.glob("*.json") if not path.name.endswith("settings.json"))
    return path


def ready_again(daemon):
    device = daemon.status()["devices"][0]
    return device["deaths"] > 0 and device["state"] == "ready"


def old_name(kernel):
    """One that it had when a name was of a problem: of a packed one that writes lse."""
    family, dtype, rest = kernel.split("-", 2)
    return f"{family}-{dtype}-group-{rest}".replace("-no-no-", "-top_left-no-lse-")


def results_file(state):
    return next(p for p in state.glob("*.json") if not p.name.endswith("settings.json"))


def until_written(state, what):
    assert fmhad.until(lambda: state.exists() and any(what in text for text in
                                                      files(state).values()))


def test_what_was_measured_is_used_and_survives(state):
    """A favourite that only a measurement explains: by another client, after the worker's death, after
    the daemon's."""
    with daemon_of(state) as daemon:
        with daemon.device() as device:
            first = tune(device)
            assert first["n_measured"] == first["n_candidates"] > 1
            assert tune(device)["n_measured"] == 0
            assert tune(device, again=True)["n_measured"] == first["n_measured"]
            kernel, shape, splits = slowest(device)
            assert claim(device, kernel, shape, 0.5, splits)["stored"]
        with daemon.device() as device:
            before = plans_by(daemon)
            assert chosen(plan(device))[0] == kernel
            assert fmhad.until(lambda: plans_by(daemon)["measured"] == before["measured"] + 1)
            plan(device, {**SMALL, "seqlen_q": 1024})  # of a length far from any that was measured
            assert fmhad.until(lambda: plans_by(daemon)["formula"] == before["formula"] + 1)
        os.kill(daemon.worker_pid(), signal.SIGKILL)
        assert fmhad.until(lambda: ready_again(daemon))
        with daemon.device() as device:
            assert chosen(plan(device))[0] == kernel
        until_written(state, shape)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.process.wait()
    with daemon_of(state) as daemon, daemon.device() as device:
        assert chosen(plan(device))[0] == kernel
        assert results(device)[kernel, shape, splits] == 0.5


def test_splits_are_chosen_by_what_was_measured(daemon):
    with daemon.device() as device:
        tuned = tune(device, DECODE)
        unsplit = next(k for k in results(device) if k[1] == tuned["shape"] and k[2] == 0)
        split = next(k for k in results(device) if k[1] == tuned["shape"] and k[2] > 1)
        claim(device, split[0], split[1], 0.25, split[2])
        assert chosen(plan(device, DECODE)) == (split[0], 2)
        claim(device, unsplit[0], unsplit[1], 0.125)
        assert chosen(plan(device, DECODE)) == (unsplit[0], 1)
        # Another window is another question.
        document = json.loads(device.explain(problem(DECODE, mask="bottom_right", window_left=16,
                                                     window_right=0)))
        assert all("tuned_us" not in c and "nearby_us" not in c
                   for s in document["selections"] for c in s["candidates"])


def test_two_workers_of_a_model_share(state):
    devices = [{"backend": "cpu", "threads": 1}, {"backend": "cpu", "threads": 1}]
    with daemon_of(state, devices=devices) as daemon:
        with daemon.device(0) as one, daemon.device(1) as two:
            kernel, shape, splits = slowest(one)
            assert fmhad.until(lambda: results(one) == results(two))
            two.call("registry_set_priority", {"kernel": kernel, "priority": 4})
            got = json.loads(one.call_json("registry_get", {"kernel": kernel}))
            assert got["priority"] == 4 and got["sets"] == ["default"]
            assert chosen(plan(one))[0] == kernel
            forgotten = one.call("registry_forget", {"shape": shape})
            assert forgotten["n_kernels"] > 0 and forgotten["stored"]
            assert results(one) == results(two) == {}
            del splits


def test_settings_survive(state):
    with daemon_of(state) as daemon, daemon.device() as device:
        kernel = chosen(plan(device))[0]
        assert device.call("registry_set_priority", {"kernel": kernel, "priority": 7})["stored"]
        assert device.call_with_text("registry_load", '["fwd-fp32-*"]', set="mine")["stored"]
        assert device.call("registry_unload", {"set": "default"})["stored"]
    with daemon_of(state) as daemon, daemon.device() as device:
        document = json.loads(device.call_json("registry_export", {}))
        assert document["sets"] == {"mine": ["fwd-fp32-*"]}
        assert json.loads(device.call_json("registry_get", {"kernel": kernel}))["priority"] == 7


def test_quarantine_survives_until_it_is_lifted(state):
    config = {**fmhad.FAKE, "supervision": {**fmhad.FAKE["supervision"], "quarantine_deaths": 2}}
    with daemon_of(state, **config) as daemon:
        for _ in range(2):
            with daemon.device() as device:
                planned = plan(device)
                device.call("inject", {"fault": "abort"})
                with pytest.raises((fmha_wire.Disconnected, fmha_wire.WireError, OSError)):
                    device.call("run", {"plan": planned["plan"]})
            fmhad.until(lambda: ready_again(daemon))
        kernel = chosen(planned)[0]
        assert kernel in json.dumps(daemon.status()["devices"][0]["quarantined"])
        until_written(state, kernel)
    with daemon_of(state, **config) as daemon, daemon.device() as device:
        assert kernel in json.dumps(daemon.status()["devices"][0]["quarantined"])
        assert chosen(plan(device))[0] != kernel
        assert device.call("registry_lift", {"kernel": kernel})["stored"]
        assert chosen(plan(device))[0] == kernel
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("registry_lift", {"kernel": kernel})
        assert caught.value.name == "ENOENT"


def test_quarantine_is_of_the_code_whatever_it_is_used_for(state):
    """A kernel that writes lse and one that does not are one function of a CPU."""
    config = {**fmhad.FAKE, "supervision": {**fmhad.FAKE["supervision"], "quarantine_deaths": 2}}
    with daemon_of(state, **config) as daemon:
        with daemon.device() as device:
            with_lse = chosen(plan(device, roles=("q", "k", "v", "o", "lse")))[0]
        for _ in range(2):
            with daemon.device() as device:
                planned = plan(device)
                device.call("inject", {"fault": "abort"})
                with pytest.raises((fmha_wire.Disconnected, fmha_wire.WireError, OSError)):
                    device.call("run", {"plan": planned["plan"]})
            fmhad.until(lambda: ready_again(daemon))
        kernel = chosen(planned)[0]
        assert with_lse == kernel
        with daemon.device() as device:
            assert chosen(plan(device, roles=("q", "k", "v", "o", "lse")))[0] != kernel
            for name in (kernel, old_name(kernel)):
                with pytest.raises(fmha_wire.WireError, match="quarantined"):
                    plan(device, roles=("q", "k", "v", "o", "lse"), kernels=[{"kernel": name}])
        until_written(state, kernel)
    with daemon_of(state, **config) as daemon, daemon.device() as device:
        assert chosen(plan(device, roles=("q", "k", "v", "o", "lse")))[0] != kernel
        assert device.call("registry_lift", {"kernel": old_name(kernel)})["stored"]
        assert chosen(plan(device, roles=("q", "k", "v", "o", "lse")))[0] == kernel


def damage_cut(path):
    path.write_text(path.read_text()[:-20])


def damage_bytes(path):
    path.write_bytes(b"\x00\xff{" + path.read_bytes()[3:])


def damage_version(path):
    path.write_text(path.read_text().replace('"version":1', '"version":2'))


def damage_result(path):
    path.write_text(path.read_text().replace('"us":', '"us":-'))


def damage_empty(path):
    path.write_text("")


def damage_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [damage_cut, damage_bytes, damage_version, damage_result,
                                    damage_empty, damage_pipe])
def test_a_damaged_file_is_left_alone(state, damage):
    with daemon_of(state) as daemon, daemon.device() as device:
        shape = tune(device)["shape"]
        until_written(state, shape)
    path = results_file(state)
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    with daemon_of(state) as daemon:
        with daemon.device() as device:
            assert results(device) == {}
            assert tune(device)["n_measured"] > 0
            assert chosen(plan(device))[0]
            status = daemon.status()["devices"][0]["tuned"]
            assert status["state"] == "unreadable" and path.name in status["reason"]
        log = daemon.log()
        assert "left as it is" in log and path.name in log
    assert before is None or path.read_bytes() == before
    assert path.is_file() == (before is not None)


def test_other_environments_are_kept_and_not_used(state):
    with daemon_of(state) as daemon, daemon.device() as device:
        shape = tune(device)["shape"]
        until_written(state, shape)
    path = results_file(state)
    stale = path.with_name(path.name[:-21] + "0123456789abcdef.json")
    document = json.loads(path.read_text())
    stale.write_text(json.dumps({**document, "sources": "others"}))
    # The same under the current name: somebody has copied it there.
    path.write_text(json.dumps({**document, "sources": "others"}))
    with daemon_of(state) as daemon, daemon.device() as device:
        assert results(device) == {}
        assert "sources: 'others'" in daemon.log()
        assert daemon.status()["devices"][0]["tuned"]["stale_files"] == 1
    assert stale.exists()


def test_the_systems_database_lies_below(state, tmp_path):
    with daemon_of(state) as daemon, daemon.device() as device:
        kernel, shape, splits = slowest(device)
        claim(device, kernel, shape, 0.5, splits)
        until_written(state, '"us":0.5')
    system = tmp_path / "system"
    state.rename(system)
    for path in system.glob("*settings.json"):
        path.unlink()
    before = files(system)
    with daemon_of(state, tuning={"system": str(system)}) as daemon, daemon.device() as device:
        assert chosen(plan(device))[0] == kernel
        other = next(k for k in results(device) if k[1] == shape and k[0] != kernel)
        claim(device, other[0], shape, 0.25, other[2])
        assert chosen(plan(device))[0] == other[0]
        until_written(state, '"us":0.25')
        assert '"us":0.5' not in "".join(files(state).values())
    assert files(system) == before


@pytest.mark.skipif(bool(fmhad.NO_OTHER_USERS), reason=fmhad.NO_OTHER_USERS)
def test_a_directory_that_cannot_be_written(tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o500)
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder != pathlib.Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    os.chown(state, 65534, 65534)
    config = {"tuning": {"state": str(state)}}
    with fmhad.Daemon(config, uid=65534) as daemon:
        with daemon.device() as device:
            kernel = chosen(plan(device))[0]
            assert tune(device)["n_measured"] > 0
            answer = device.call("registry_set_priority", {"kernel": kernel, "priority": 2})
            assert not answer.get("stored")
            assert json.loads(device.call_json("registry_get",
                                               {"kernel": kernel}))["priority"] == 2
        assert daemon.log().count("will not outlive this daemon") == 1 and str(state) in daemon.log()  # said once
        assert "not written" not in daemon.log()
    assert list(state.iterdir()) == []


def test_a_full_disk(state):
    """As /dev/full has it: the daemon's files may not grow."""
    state.mkdir()
    with daemon_of(state) as daemon, daemon.device() as device:
        kernel = chosen(plan(device))[0]
        assert device.call("registry_set_priority", {"kernel": kernel, "priority": 2})["stored"]
        before = files(state)
        fmhad.resource.prlimit(daemon.pid, fmhad.resource.RLIMIT_FSIZE, (64, -1))
        # What the workers are told is a file in memory, which may not grow either.
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("registry_set_priority", {"kernel": kernel, "priority": 3})
        assert caught.value.name == "ENOMEM" and "told" in caught.value.message
        assert files(state) == before
        # Its answers and its log are files, too.
        fmhad.resource.prlimit(daemon.pid, fmhad.resource.RLIMIT_FSIZE, (-1, -1))
        status = daemon.status()["devices"][0]["tuned"]
        assert status["state"] == "unwritable" and "settings.json" in status["reason"]


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path):
    """At once in the log and in status, by doctor, and to who measures: nothing is lost in silence."""
    (tmp_path / "file").write_text("")
    state = tmp_path / "file" / "tuned"
    with daemon_of(state) as daemon:
        with daemon.device() as device:
            plan(device)
        status = daemon.status()["devices"][0]["tuned"]
        assert status["state"] == "unwritable" and str(state) in status["reason"]
        assert "will not outlive this daemon: " + str(state) in daemon.log()

        def fmhactl(*words):
            return subprocess.run([fmhad.find_program("fmhactl"), *words, "--socket", daemon.socket], capture_output=True,
                                  text=True, check=False, timeout=120)

        told = fmhactl("doctor")
        assert told.returncode == 1 and "tuning.state" in told.stdout and str(state) in told.stdout
        assert str(state) in fmhactl("status").stdout
        told = fmhactl("tune", "-b=1", "-h=1", "-s=32", "-d=16")
        assert told.returncode == 0 and "forgets this (unwritable)" in told.stderr, told.stderr


def test_one_daemon_writes_to_a_directory(state):
    with daemon_of(state) as first, daemon_of(state) as second:
        with first.device() as one, second.device() as two:
            kernel = chosen(plan(one))[0]
            set_to = lambda device, n: device.call("registry_set_priority",
                                                   {"kernel": kernel, "priority": n}).get("stored")
            assert set_to(one, 1) and not set_to(two, 2) and set_to(one, 3)
        assert f"another fmhad, process {first.pid}, writes there" in second.log()
        state_of = lambda daemon: daemon.status()["devices"][0]["tuned"]
        assert str(first.pid) in state_of(second)["reason"] and state_of(first)["state"] == "ok"


def test_who_takes_a_directory_over_reads_it_again(state):
    """The second daemon has what it read when it began: it writes nothing of that over what the first one has stored."""
    with daemon_of(state) as first, daemon_of(state) as second:
        with second.device() as two:
            with first.device() as one:
                kernel, other = (chosen(plan(one, {**SMALL, "hdim_q": n, "hdim_v": n}))[0] for n in (64, 128))
                assert kernel != other
                assert one.call("registry_set_priority", {"kernel": kernel, "priority": 3})["stored"]
                tune(one)
                measured = results(one)
            assert measured and not results(two)
            first.stop()

            def set_other():
                try:
                    return two.call("registry_set_priority", {"kernel": other, "priority": 5}).get("stored")
                except fmha_wire.WireError as error:
                    assert error.name == "EBUSY"  # it is being read

            priority = lambda device, name: json.loads(device.call_json("registry_get", {"kernel": name})).get("priority", 0)
            assert not set_other()
            assert fmhad.until(lambda: priority(two, kernel) == 3)
            assert fmhad.until(set_other)
            assert results(two).keys() >= measured.keys() and priority(two, kernel) == 3
    with daemon_of(state) as third, third.device() as device:
        assert (priority(device, kernel), priority(device, other)) == (3, 5) and results(device).keys() >= measured.keys()


@pytest.mark.skipif(bool(fmhad.NO_OTHER_USERS), reason=fmhad.NO_OTHER_USERS)
def test_a_file_of_another_user_is_left_alone(state):
    with daemon_of(state) as daemon, daemon.device() as device:
        tune(device)
        assert results(device)
    for path in state.iterdir():
        if path.name.endswith(".json"):
            os.chown(path, 65534, 65534)
    before = files(state)
    with daemon_of(state) as daemon, daemon.device() as device:
        assert results(device) == {} and "it is user 65534's" in daemon.log()
        assert daemon.status()["devices"][0]["tuned"]["state"] == "unreadable"
    assert {name: text for name, text in files(state).items() if name.endswith(".json")} == {
        name: text for name, text in before.items() if name.endswith(".json")}


def test_kill_while_writing(state):
    """Whatever is on disk can be read."""
    for attempt in range(6):
        with daemon_of(state) as daemon, daemon.device() as device:
            kernel = chosen(plan(device))[0]
            numbers = [device.submit("registry_set_priority", {"kernel": kernel, "priority": i + 1}) for i in range(20)]
            device.wait(numbers[attempt])
            os.kill(daemon.pid, signal.SIGKILL)
            daemon.process.wait()
        for name, text in files(state).items():
            if not name.startswith("."):
                json.loads(text)
    with daemon_of(state) as daemon, daemon.device() as device:
        assert json.loads(device.call_json("registry_get", {"kernel": kernel}))["priority"] > 0
        assert "left as" not in daemon.log()


@pytest.mark.skipif(bool(fmhad.NO_OTHER_USERS), reason=fmhad.NO_OTHER_USERS)
def test_only_administrators_change_and_measure():
    with fmhad.Daemon({"admin_uids": [1001]}, open_to_all=True) as daemon:
        with daemon.device() as device:
            kernel = chosen(plan(device))[0]

        def ask(method, params, fds=()):
            with daemon.device() as device:
                try:
                    device.call(method, params, fds, timeout=60)
                    return "OK"
                except fmha_wire.WireError as error:
                    return error.name

        asked = [("registry_set_priority", {"kernel": kernel, "priority": 1}),
                 ("registry_lift", {"kernel": kernel}),
                 ("registry_forget", {}),
                 ("tune", {"problem": problem()}),
                 ("registry_unload", {"set": "default"})]
        assert as_user(1002, lambda: [ask(*a) for a in asked]) == ["EPERM"] * len(asked)
        assert as_user(1002, lambda: ask("registry_get", {"kernel": kernel})) == "OK"
        assert as_user(1001, lambda: [ask(*a) for a in asked]) == ["OK", "ENOENT", "OK", "OK", "OK"]


def run_shapes(device, lengths):
    for n in lengths:
        planned = plan(device, {**SMALL, "seqlen_q": n, "seqlen_k": n})
        device.call("run", {"plan": planned["plan"]})
        device.call("plan_release", {"plan": planned["plan"]})


@pytest.mark.skipif(bool(fmhad.NO_OTHER_USERS), reason=fmhad.NO_OTHER_USERS)
def test_a_flood_of_shapes_drives_nobody_out():
    with fmhad.Daemon(open_to_all=True) as daemon:
        def flood():
            with daemon.device() as device:
                run_shapes(device, range(1, 17))
                for heads in range(1, 9):
                    for n in range(1, 17):
                        planned = plan(device, {**SMALL, "nhead_q": heads, "nhead_k": heads,
                                                "seqlen_q": n, "seqlen_k": 17 - n})
                        device.call("run", {"plan": planned["plan"]})
                        device.call("plan_release", {"plan": planned["plan"]})
                return json.loads(device.call_json("census", {}))

        with daemon.device() as device:
            run_shapes(device, [64, 64])
        theirs = as_user(1001, flood)
        assert len(theirs["shapes"]) == 64 and all(s["uid"] == 1001 for s in theirs["shapes"])
        assert "evicted" not in theirs
        with daemon.device() as device:
            seen = json.loads(device.call_json("census", {}))
        mine = [s for s in seen["shapes"] if s["uid"] == 0]
        assert [s["runs"] for s in mine] == [2] and len(seen["shapes"]) == 65
        assert seen["evicted"] > 0


def test_an_idle_device_measures_what_was_used(state):
    with daemon_of(state, tuning={"idle_s": 0, "share": 100}) as daemon:
        with daemon.device() as device:
            run_shapes(device, [64])
            assert fmhad.until(lambda: results(device))
            assert fmhad.until(lambda: json.loads(device.call_json("census", {}))["shapes"][0]
                               ["settled"])
            assert not daemon.status()["devices"][0]["worker"]["tuning"]["busy"]
            counted = dict(line.split() for line in fmhactl("metrics", FMHAD_SOCKET=daemon.socket).splitlines()
                           if line.startswith("fmhad_tun"))
            assert float(counted['fmhad_tuned_problems_total{device="0"}']) == 1
            assert float(counted['fmhad_tuned_times_total{device="0"}']) == len(results(device))
            assert float(counted['fmhad_tuning_seconds_total{device="0"}']) > 0


def test_automatic_tuning_is_off_with_one_key(state):
    """And on again without a restart."""
    with daemon_of(state, tuning={"idle_s": 0, "automatic": False}) as daemon:
        with daemon.device() as device:
            run_shapes(device, [64])
            time.sleep(0.3)
            assert results(device) == {}
            reload_tuning(daemon, automatic=True)
            assert fmhad.until(lambda: results(device))


def test_a_client_ends_what_an_idle_device_began(state):
    """Once the device is idle again it goes on with what is left."""
    with daemon_of(state, tuning={"idle_s": 1, "share": 1}) as daemon:
        def is_busy():
            return daemon.status()["devices"][0]["worker"]["tuning"]["busy"]

        with daemon.device() as device:
            run_shapes(device, [192])
            assert not is_busy() and fmhad.until(lambda: results(device)) and is_busy()
            run_shapes(device, [192])
            assert fmhad.until(lambda: not is_busy())
            first = results(device)
            shape = json.loads(device.call_json("census", {}))["shapes"][0]
            assert shape["runs"] == 2 and not shape["settled"]
            reload_tuning(daemon, share=100)
            assert fmhad.until(lambda: json.loads(device.call_json("census", {}))["shapes"][0]["settled"])
            assert len(results(device)) > len(first)
            assert all(results(device)[key] == us for key, us in first.items())


def test_a_plan_takes_what_became_known(daemon):
    """At its next run, under the same number, if it fits; never where results must stay the same."""
    with daemon.device() as device:
        kernel, shape, splits = slowest(device)
        planned = plan(device)
        assert chosen(planned)[0] != kernel
        fixed = device.plan({**SMALL, "n_splits": 1, "tensors": {
            role: {"buffer": device.buffer_create(1 << 18).id, "dtype": "f32"} for role in "qkvo"}})

        def runs_of(name):
            return json.loads(device.call_json("registry_get", {"kernel": name})).get("runs", 0)

        device.call("run", {"plan": planned["plan"]})
        claim(device, kernel, shape, 0.5, splits)
        before = runs_of(kernel)
        assert fmhad.until(lambda: device.call("run", {"plan": planned["plan"]}) and
                           runs_of(kernel) > before)
        # Its word is another one; so much is known there, too.
        other = next(k[0] for k in results(device) if k[1] == shape and k[0] != chosen(fixed)[0])
        claim(device, other, shape + "+n1", 0.5)
        before = runs_of(other)
        for _ in range(3):
            device.call("run", {"plan": fixed["plan"]})
        assert runs_of(other) == before


def test_an_import_of_another_environment_is_refused(daemon):
    with daemon.device() as device:
        kernel, shape, splits = slowest(device)
        document = json.loads(device.call_json("registry_export", {"filter": "hdim_q == 32"}))
        document["environment"] = "another driver"
        document["kernels"] = [{"name": kernel, "tuned": [
            {"shape": shape, "splits": splits, "us": 0.1, "when": int(time.time()) + 10}]}]
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call_with_text("registry_import", json.dumps(document))
        assert caught.value.field == "environment"
        # An older measurement of this one does not win.
        document = json.loads(device.call_json("registry_export", {"filter": "hdim_q == 32"}))
        document["kernels"] = [{"name": kernel, "tuned": [
            {"shape": shape, "splits": splits, "us": 0.1, "when": 1}]}]
        assert device.call_with_text("registry_import", json.dumps(document))["n_kernels"] == 0
        assert results(device)[kernel, shape, splits] > 0.1


def test_problems_that_cannot_be_measured_say_why(daemon):
    with daemon.device() as device:
        for sizes, name in [({**SMALL, "hdim_q": 584}, "EINVAL"),
                            ({**SMALL, "seqlen_q": 1 << 20, "nhead_q": 64, "nhead_k": 64}, "EQUOTA")]:
            with pytest.raises(fmha_wire.WireError) as caught:
                tune(device, sizes)
            assert caught.value.name == name
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("tune", {"problem": {}, "shape": "nobody.used.it"})
        assert caught.value.name == "ENOENT"
        device.ping()


def fmhactl(*arguments, **environment):
    done = subprocess.run([fmhad.find_program("fmhactl"), *arguments], capture_output=True, text=True, check=False,
                          timeout=60, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fmhactl_lists_the_census():
    with fmhad.Daemon() as daemon:
        assert "nothing has been run" in fmhactl("census", FMHAD_SOCKET=daemon.socket)
        with daemon.device() as device:
            run_shapes(device, [64, 64, 32])
        shapes = json.loads(fmhactl("census", "--json", FMHAD_SOCKET=daemon.socket))["shapes"]
        assert sorted(s["runs"] for s in shapes) == [1, 2]
        text = fmhactl("census", FMHAD_SOCKET=daemon.socket).splitlines()
        assert len(text) == 5
        for line, kernel, shape in zip(text[1::2], text[2::2], shapes):
            uid, runs, ms, _, measured, word = line.split()
            assert kernel.split(",")[0].strip() == shape["kernel"]
            assert (int(uid), int(runs), word) == (os.geteuid(), shape["runs"], shape["shape"])
            assert float(ms) > 0 and measured in ("yes", "no")


def test_a_fitted_model_is_found_and_used(tmp_path):
    """A tree as LightGBM gives it, through the tool that writes models, in a folder of specs."""
    arch = "sm_90a"
    fmhad.bare_specs(tmp_path)
    (tmp_path / "models").mkdir()
    names = selection.feature_names(str(fmhad.find_program("fmhactl")), arch)
    nodes = []
    fit_model.flatten({"split_feature": names.index("m0"), "threshold": 64.0, "left_child": {"leaf_value": -9},
                       "right_child": {"leaf_value": 9}}, nodes)

    def explain(hdim=128):
        document = json.loads(fmhactl("plan", "--arch", arch, "-s=4096", f"-d={hdim}", "-h=16", "--json",
                                      "--features", FMHA_SPECS_DIR=str(tmp_path)))
        return document["selections"][-1]

    def choose(hdim=128):
        candidate = next(c for c in explain(hdim)["candidates"] if c["verdict"] == "chosen")
        return candidate["name"], candidate["time_from"]

    name, source = choose()
    assert "-t128x" in name and source == "formula"
    unfitted = name
    rows = [candidate["features"] for candidate in explain()["candidates"] if "features" in candidate]
    file = tmp_path / "models" / f"{arch}.json"
    file.write_text(fit_model.model_text(arch, {}, names, rows, [nodes]))
    name, source = choose()
    assert ("-t64x" in name or "-t32x" in name or "-t16x" in name) and source == "model"
    assert choose(hdim=64)[1] == "formula"  # of which nothing was measured
    # Trees of the kinds of problems, joined: this one is forward, and nothing else's trees count.
    same, forward = [[-1, 0, 0, 0, 0.0]], fit_model.kinds_of(names, numpy.array(rows))[0]
    for kind in range(len(fit_model.QUESTIONS) + 1):
        trees = [same] * kind + [nodes] + [same] * (len(fit_model.QUESTIONS) - kind)
        file.write_text(fit_model.model_text(arch, {}, names, rows, [fit_model.join(names, trees)]))
        tile, source = choose()
        assert (tile != unfitted) == (kind == forward) and source == "model"
    file.write_text(fit_model.model_text(arch, {}, names, rows, [nodes]))
    # It knows what is not split, and nothing of what is: no number of splits is compared with the other.
    document = json.loads(fmhactl("plan", "--arch", arch, "-b=8", "-h=32", "-s=16", "-s_k=16384", "-d=128", "--json",
                                  FMHA_SPECS_DIR=str(tmp_path)))
    assert "us unsplit" in document["plan"]["split_why"]
    file.write_text(fit_model.model_text(arch, {}, names, rows, [nodes]).replace('"flops"', '"flips"'))  # of another build's features
    assert choose()[1] == "formula"


def test_what_measuring_took_is_given_back(make_daemon):
    """Also when no client's run follows it."""
    daemon = make_daemon()

    def anonymous():
        (worker,) = pathlib.Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
        status = pathlib.Path(f"/proc/{worker}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))

    with daemon.device() as device:
        device.ping()
        before = anonymous()
        sizes = {"batch": 4, "nhead_q": 8, "nhead_k": 8, "seqlen_q": 1024, "seqlen_k": 1024, "hdim_q": 64, "hdim_v": 64}
        tensors = {role: {"buffer": 1, "offset": i << 24, "dtype": "f32"} for i, role in enumerate("qkvo")}
        device.call("tune", {"problem": {**sizes, "tensors": tensors}, "again": True, "budget_ms": 200})
        taken = anonymous() - before
        assert taken > 16 << 10, "kB: measuring took no memory, so that nothing is shown"
        # Tables of what was measured stay.
        assert fmhad.until(lambda: anonymous() - before < 4 << 10), (before, taken, anonymous())
