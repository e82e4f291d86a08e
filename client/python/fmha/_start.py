# SPDX-License-Identifier: MIT
"""The process's own connection, and a daemon of this process tree for machines where nobody runs one."""
from __future__ import annotations

import atexit
import json
import os
import pathlib
import sys
import threading
import time

from ._lib import NotAllowedError, UnreachableError, native
from ._service import Client

# The daemon lives as long as somebody holds the write end of the shell's standard input: this process and the children that
# it forks, however they end. The shell then ends the daemon and removes its folder.
_KEEPER = 'fmhad=$1; folder=$2; "$fmhad" --config "$folder/fmhad.json" </dev/null & read -r _; kill $!; wait $!; rm -rf "$folder"'

_running: dict = {}


def program(name: str) -> str | None:
    """fmhad or fmhactl: the wheel's own, $FMHA_BIN's, PATH's."""
    import shutil

    chosen = os.environ.get("FMHA_BIN")
    if chosen:
        return shutil.which(name, path=chosen)
    carried = native("bin", name)
    if carried:
        return str(carried)
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin")


def _with_nvrtc(config: dict) -> dict:
    """@config, told where pip put NVRTC (the extra `fmha[cuda]`) unless it says something itself."""
    folders = [str(p.parent) for root in sys.path for p in pathlib.Path(root or ".").glob("nvidia/*/lib/libnvrtc.so.*")]
    compile_keys = config.get("compile", {})
    if not folders or "library_path" in compile_keys:
        return config
    return {**config, "compile": {**compile_keys, "library_path": ":".join(dict.fromkeys(folders))}}


def start(*, config: dict | None = None, timeout: float = 20) -> str:
    """Starts a private daemon for this process and its children, unless one was started already and still answers.

    It ends when all of them have ended, however they do. FMHAD_SOCKET names it from now on, so that children use it too.

    Args:
        config: keys of fmhad.json(5) besides the socket.
        timeout: seconds to wait for it.

    Returns:
        Its socket's path.

    Raises:
        UnreachableError: there is no fmhad, or it ended; the sentence has the end of its log.
    """
    import subprocess  # here: they would be a quarter of what `import fmha` takes, and most programs start no daemon
    import tempfile

    if _running.get("pid") == os.getpid():
        if _answers(_running["socket"]):
            return _running["socket"]
        stop()  # what is left of it
    fmhad = program("fmhad")
    if fmhad is None:
        raise UnreachableError("ECONN", "no fmhad is installed: not in the package, FMHA_BIN, PATH, or /usr/sbin")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fmha-"))
    socket, log = str(folder / "fmhad.sock"), folder / "log"
    (folder / "fmhad.json").write_text(json.dumps({**_with_nvrtc(config or {}), "socket": socket}))
    with open(log, "wb") as file:
        keeper = subprocess.Popen(["/bin/sh", "-c", _KEEPER, "fmha-keeper", fmhad, str(folder)], stdin=subprocess.PIPE,
                                  stdout=file, stderr=file, start_new_session=True)
    _wait(keeper, socket, log, timeout)
    _running.update(pid=os.getpid(), socket=socket, keeper=keeper)
    os.environ["FMHAD_SOCKET"] = socket
    _forget_default()
    return socket


def _answers(socket) -> bool:
    try:
        Client(socket).close()
    except UnreachableError:
        return False
    return True


def _children(pid) -> list[str] | None:
    """States of a process's children, as /proc has them; None where this kernel does not say."""
    try:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pathlib.Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] for child in children]
    except OSError:
        return None


def _wait(keeper, socket, log, timeout):
    until, had_child = time.monotonic() + timeout, False
    while True:
        try:
            Client(socket, timeout=max(0.1, until - time.monotonic())).close()
            return
        except UnreachableError:
            # The shell, which reads, leaves an ended daemon a zombie (dash), or nothing (bash).
            states = _children(keeper.pid)
            ended = keeper.poll() is not None or (states == [] and had_child) or (bool(states) and set(states) == {"Z"})
            had_child = had_child or bool(states)
            if ended or time.monotonic() > until:
                told = log.read_text(errors="replace").strip().splitlines()[-3:]
                keeper.stdin.close()  # and the folder goes, with the log
                raise UnreachableError("ECONN", "fmhad did not start: " + "; ".join(told)) from None
        time.sleep(0.02)


def stop() -> None:
    """Ends the daemon that start() made, if any; at exit this happens by itself."""
    if _running.get("pid") != os.getpid():
        return
    keeper = _running["keeper"]
    _running.clear()
    os.environ.pop("FMHAD_SOCKET", None)
    _forget_default()
    keeper.stdin.close()
    keeper.wait()


atexit.register(stop)


def _connect() -> Client:
    """The default client: of the daemon that is there, or of one started for it where FMHA_AUTOSTART says so."""
    if os.environ.get("FMHA_AUTOSTART", "") not in ("", "0"):
        try:
            return Client()
        except (UnreachableError, NotAllowedError):
            return Client(start())
    try:
        return Client()
    except (UnreachableError, NotAllowedError) as error:
        message = f"{error} (or, for this program alone: fmha.start(), or FMHA_AUTOSTART=1)"
        raise type(error)(error.code, message, error.field) from None


_default: Client | None = None
_default_lock = threading.Lock()


def default_client() -> Client:
    """The process's own connection, made at the first call; a forked child makes its own."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = _connect()
    return _default


def _forget_default() -> None:
    """The next call connects again."""
    global _default
    _default = None


_inherited: list = []  # a child must not free what is its parent's while threads of it are gone


def _in_child():
    global _default, _default_lock
    _inherited.append(_default)
    _default, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_in_child)
