# SPDX-License-Identifier: MIT
"""`./dev demo pool`: a cache that outlives its users. One serves, is killed with SIGKILL in the middle of a token, and the next goes on.

Each server is a process of its own (pool_model.py). The tokens of all of them are compared with those of one that found nothing in a
pool of its own, and at the end no page is lost.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "lib"))
import fmhad

MODEL = HERE / "pool_model.py"


def say(text):
    print(text, flush=True)


class Server:
    def __init__(self, daemon, pool, prompt, new, pause=0.0):
        env = {**os.environ, "FMHAD_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
               "PYTHONPATH": str(fmhad.build_dir() / "client/python"),
               "FMHA_CLIENT_LIBRARY": str(fmhad.build_dir() / "client/libfmha_client.so.1")}
        self.process = subprocess.Popen([sys.executable, str(MODEL), pool, str(prompt), str(new), "--pause", str(pause)], env=env,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = json.loads(self.process.stdout.readline())
        self.tokens = []

    def ask(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        first = json.loads(self.process.stdout.readline())
        self.tokens.append(first["token"])
        return first

    def read(self, n=None):
        """Tokens, @n or all that come."""
        while n is None or len(self.tokens) < n:
            line = self.process.stdout.readline()
            if not line.endswith("\n"):
                break
            self.tokens.append(json.loads(line)["token"])
        return self.tokens

    def end(self):
        self.read()
        return self.process.wait()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        killed = time.perf_counter()
        self.process.wait()
        return killed


def pool_of(daemon, name):
    (found,) = [pool for pool in daemon.status()["front"]["pools"] if pool["name"] == name]
    return found


def run(prompt, new):
    """What was found: times, hits and whether all tokens are those of the one that shared nothing."""
    found = {"prompt": prompt}
    with fmhad.Daemon({"devices": [{"backend": "cpu"}]}) as daemon:
        alone = Server(daemon, "alone", prompt, new)
        found["cold_s"] = alone.ask()["first_token_s"]
        wanted = alone.read()
        assert alone.end() == 0 and len(wanted) == new

        first = Server(daemon, "shared", prompt, new, pause=0.02)
        first.ask()
        first.read(new // 2)
        second = Server(daemon, "shared", prompt, new)  # it waits, ready, as a successor does
        killed = first.kill()
        answer = second.ask()
        found["recovery_s"] = time.perf_counter() - killed
        found["hits"], found["warm_s"] = answer["hits"], answer["first_token_s"]
        found["pages"] = (prompt - 1) // 16
        second.read()
        found["ended"] = second.end()

        longer = Server(daemon, "shared", prompt + 100, 4)
        found["longer_hits"] = longer.ask()["hits"]
        longer.end()
        found["equal"] = first.tokens == wanted[:len(first.tokens)] and second.tokens == wanted
        found["killed_after"] = len(first.tokens)
        settled = fmhad.until(lambda: pool_of(daemon, "shared")["users"] == 0)
        pool = pool_of(daemon, "shared")
        found["pool"] = pool
        found["whole"] = bool(settled) and pool["free"] + pool["sealed"] == pool["pages"] and pool["pinned"] == 0
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--new", type=int, default=48)
    o = parser.parse_args()
    say(f"a prompt of {o.prompt} tokens, three servers, one of them killed (a minute)")
    found = run(o.prompt, o.new)
    say(f"nobody had it: {found['pages'] + 1} pages computed, first token after {found['cold_s']:.2f} s")
    say(f"killed after {found['killed_after']} tokens: its successor found {found['hits']} of {found['pages']} pages and had its first token "
        f"{found['recovery_s']:.3f} s after the kill ({found['warm_s']:.3f} s of its own: {found['warm_s'] / found['cold_s']:.3f} of cold)")
    say(f"a longer prompt with that beginning: {found['longer_hits']} pages found")
    pool = found["pool"]
    say(f"pages: {pool['free']} free, {pool['sealed']} sealed, {pool['leased']} leased, {pool['lost']} lost, of {pool['pages']}")
    good = found["equal"] and found["whole"] and found["hits"] == found["pages"] and found["longer_hits"] >= found["pages"] \
        and found["ended"] == 0
    say("all tokens are those of a server that shared nothing" if good else f"WRONG: {found}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
