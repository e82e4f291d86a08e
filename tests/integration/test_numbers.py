# SPDX-License-Identifier: MIT
"""Every integer of every method of a worker at the ends of its range, alone and in pairs: whatever is
answered, no worker ends of it."""
import itertools
import json
import os
import re

import pytest

import fmha_wire
import fmhad

ENDS = (0, 1, -1, 2**31 - 1, 2**31, 2**31 + 1, 2**63 - 1)
SIZES = {"batch": 1, "nhead_q": 2, "nhead_k": 2, "seqlen_q": 16, "seqlen_k": 16, "hdim_q": 32, "hdim_v": 32}


def tables():
    """Integers of each message, by name; of a problem's those that are not its tensors'."""
    problem = re.findall(r"X\((?:SIZE|NUMBER|COUNTER), (\w+),", (fmhad.ROOT / "proto/include/fmha/base.h").read_text())
    text = (fmhad.ROOT / "proto/include/proto/messages.def").read_text()
    found = re.findall(r"#define MESSAGE (\w+)\nBEGIN\n(.*?)\nEND", text, re.S)
    return {"problem": problem} | {name: re.findall(r"^\t(?:U32|U64|I32)\((\w+)", rows, re.M) for name, rows in found}


def integers_of_methods():
    """Of each method of a worker's."""
    text = (fmhad.ROOT / "proto/include/proto/methods.h").read_text()
    rows = re.findall(r'X\(\w+, "(\w+)", (\w+), \d, \d, (\w+),\s+\w+\)', text.replace("\\\n", " "))
    known = tables()
    return {name: known.get(params, []) for name, server, params in rows if server in ("WORKER", "BOTH")}


NUMBERS = tables()["problem"]
PAIRED = tuple(SIZES) + ("n_splits", "split_size", "window_left", "window_right", "sink_tokens", "min_seqlen_q")
PAGED = ("batch", "nhead_k", "seqlen_q", "seqlen_k", "hdim_v", "n_splits", "split_size", "page_size", "n_pages",
         "max_blocks", "window_left")
CHOSEN = (*SIZES, "topk", "min_seqlen_q")
STEP = int(os.environ.get("FMHA_NUMBERS_STEP", "1"))  # every so many of the pairs; 1: all


@pytest.fixture(name="daemon", scope="module")
def make_daemon():
    with fmhad.Daemon({"devices": [{"backend": "cpu", "threads": 1}]}) as daemon:
        yield daemon


class Asker:
    """Asks, whatever the answer is, and counts; a worker that ends is the failure."""

    def __init__(self, daemon):
        self.daemon, self.device, self.n, self.answered = daemon, daemon.device(), 0, 0
        self.buffer, self.output = (self.device.buffer_create(1 << 20) for _ in range(2))

    def problem(self, stride=None, **sizes):
        """stride: of what is read; what is written may not lie in one place."""
        tensors = {role: {"buffer": self.buffer.id, "dtype": "bf16", **({"stride": stride} if stride else {})}
                   for role in "qkv"}
        tensors["o"] = {"buffer": self.output.id, "dtype": "bf16"}
        return {**SIZES, "scale": 0.1, "mask": "none", **sizes, "tensors": tensors}

    def paged(self, **sizes):
        problem = self.problem(**{"page_size": 16, "n_pages": 8, "max_blocks": 4, **sizes})
        for role in ("block_table", "seqlen_k_per_batch"):
            problem["tensors"][role] = {"buffer": self.buffer.id, "dtype": "i32"}
        return problem

    def chosen(self, **sizes):
        """Values in the keys, and one index for all rows and entries."""
        problem = self.problem(stride=[0, 0, 0, 1], **{"topk": 5, "v_in_k": True, **sizes})
        del problem["tensors"]["v"]
        problem["tensors"]["indices"] = {"buffer": self.buffer.id, "dtype": "i32", "stride": [0, 0, 0], "extent": [
            problem["batch"], problem["seqlen_q"], problem["topk"]]}
        return problem

    def ask(self, method, params, fds=()):
        self.n += 1
        try:
            result, _ = self.device.call_with_fds(method, params, fds, timeout=60)
        except fmha_wire.WireError:
            return None
        except (fmha_wire.Disconnected, OSError) as error:
            raise AssertionError(f"{method} {json.dumps(params)}: {error}: "
                                 + self.daemon.status()["devices"][0]["last_death"]) from error
        self.answered += 1
        return result

    def about(self, problem, every=True):
        """All methods that take a problem."""
        self.ask("local_runs", {"problem": problem, "runs": 2**63 - 1, "version": 0})
        planned = self.ask("plan", {"problem": problem})
        if planned:
            self.ask("run", {"plan": planned["plan"], "timeout_ms": 1})
            self.ask("plan_release", {"plan": planned["plan"]})
        if every:
            self.ask("explain", {"problem": problem})
            self.ask("local_plan", {"problem": problem})


def no_deaths(daemon):
    assert daemon.status()["devices"][0]["deaths"] == 0


def test_what_a_problem_says(daemon):
    asker = Asker(daemon)
    for name, value in itertools.product(NUMBERS, ENDS):
        asker.about(asker.problem(**{name: value}))
        asker.about({**asker.problem(stride=[0, 0, 0, 1], **{name: value}), "mask": "top_left"}, every=False)
    for at, value in itertools.product(range(4), ENDS):
        asker.about(asker.problem(stride=[value if i == at else 1 for i in range(4)]))
    assert asker.answered > 300
    no_deaths(daemon)


def test_what_a_problem_says_twice(daemon):
    """Pairs, of tensors whose elements all lie in one place, so that sizes alone refuse nothing."""
    asker = Asker(daemon)
    pairs = [p for p in itertools.product(itertools.combinations(PAIRED, 2), itertools.product(ENDS, ENDS))]
    for names, values in pairs[::STEP]:
        asker.about(asker.problem(stride=[0, 0, 0, 1], **dict(zip(names, values))), every=False)
    no_deaths(daemon)


def test_what_a_problem_with_pages_says_twice(daemon):
    asker = Asker(daemon)
    assert asker.ask("plan", {"problem": asker.paged()})
    pairs = [p for p in itertools.product(itertools.combinations(PAGED, 2), itertools.product(ENDS, ENDS))]
    for names, values in pairs[::STEP]:
        asker.about(asker.paged(**dict(zip(names, values))), every=False)
    no_deaths(daemon)


def test_what_a_problem_of_chosen_keys_says_twice(daemon):
    asker = Asker(daemon)
    assert asker.ask("plan", {"problem": asker.chosen()})
    pairs = [p for p in itertools.product(itertools.combinations(CHOSEN, 2), itertools.product(ENDS, ENDS))]
    for names, values in pairs[::STEP]:
        asker.about(asker.chosen(**dict(zip(names, values))), every=False)
    no_deaths(daemon)


def test_every_integer_is_asked_for():
    assert len(NUMBERS) > 30 and {*PAIRED, *PAGED, *CHOSEN, "dropout_seed"} <= set(NUMBERS), NUMBERS
    integers = integers_of_methods()
    assert len(integers) > 20 and sum(map(len, integers.values())) > 12, integers
    assert integers["buffer_import"] == ["size", "base_offset"] and "plan" in integers["run"]


def test_more_work_than_there_is_time(daemon):
    """2^62 operations on tensors of one row: nothing to run, and nothing to be believed."""
    asker = Asker(daemon)
    for heads, seqlen in itertools.product((1, 64, 1024, 65535), (2**30, 2**31 - 1)):
        problem = asker.problem(stride=[0, 0, 0, 1], nhead_q=heads, nhead_k=heads, seqlen_q=seqlen,
                                seqlen_k=seqlen, hdim_q=256, hdim_v=256)
        for runs in (1, 2**32, 2**63 - 1, 2**64 - 1):
            asker.ask("local_runs", {"problem": problem, "runs": runs, "version": 1})
    assert asker.answered > 0
    no_deaths(daemon)


def test_what_other_methods_say(daemon):
    asker = Asker(daemon)
    planned = asker.ask("plan", {"problem": asker.problem()})
    fields = {
        "buffer_create": {"size": 4096}, "buffer_release": {"buffer": 0}, "plan_release": {"plan": 0},
        "event_release": {"event": 0}, "cancel": {"request": 0},
        "event_import": {"handle": b"x" * 64},
        "run": {"plan": planned["plan"], "timeout_ms": 0},
        "registry_set_priority": {"kernel": "none", "priority": 0}, "inject": {"fault": "hang", "after": 0},
        "registry_export": {"filter": ""}, "registry_get": {"kernel": "none"}, "registry_lift": {"kernel": "none"},
        "registry_forget": {"kernel": "none", "shape": ""}, "tune": {"problem": asker.problem(), "budget_ms": 1},
        "census": {}, "trace": {}, "ping": {}, "code": {"hash": b"x" * 32},
    }
    integers = integers_of_methods()
    assert set(integers) - set(fields) == {"plan", "explain", "local_plan", "local_runs", "buffer_import",
                                           "registry_import", "registry_load", "registry_unload"}
    for method, params in fields.items():
        params.update({name: 0 for name in integers[method] if name not in params})
        numbers = [name for name, value in params.items() if isinstance(value, int)]
        asker.ask(method, params)
        for values in itertools.product(ENDS, repeat=min(len(numbers), 2)):
            asker.ask(method, {**params, **dict(zip(numbers, values))})
    for fence in ("waits", "signals"):
        for offset, value in itertools.product(ENDS, ENDS):
            asker.ask("run", {"plan": planned["plan"], "timeout_ms": 1,
                              fence: [{"buffer": asker.buffer.id, "offset": offset, "value": value}]})
    for offset in ENDS:
        asker.ask("run", {"plan": planned["plan"],
                          "rebinds": [{"role": "q", "buffer": asker.buffer.id, "offset": offset}]})
    with open("/proc/self/exe", "rb") as file:
        for values in itertools.product(ENDS, ENDS):
            asker.ask("buffer_import", {"kind": "memfd", "size": values[0], "base_offset": values[1]}, [file.fileno()])
    no_deaths(daemon)
