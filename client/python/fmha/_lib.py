# SPDX-License-Identifier: MIT
"""libfmha_client through cffi, and its errors as exceptions."""
from __future__ import annotations

import os
import pathlib
import threading

from ._abi import ffi

PACKAGE = pathlib.Path(__file__).absolute().parent  # not resolved: a build tree links the sources
SONAME = "libfmha_client.so.1"


class FmhaError(Exception):
    """What fmhad or libfmha_client answered.

    Attributes:
        code: "EINVAL", "ENOKERNEL", ...: the names of <fmha/base.h>.
        field: the problem's field that is at fault ("tensor.k.stride"), or "".
    """

    def __init__(self, code: str, message: str, field: str = ""):
        super().__init__(message)
        self.code = code
        self.field = field

    def __reduce__(self):
        # Exception's own calls the class with args, the message alone, and multiprocessing's pools then hang.
        return type(self), (self.code, self.args[0], self.field), self.__dict__


class InvalidError(FmhaError, ValueError):
    """EINVAL: an argument breaks a documented rule."""


class NotSupportedError(FmhaError, NotImplementedError):
    """ENOTSUP, ENOKERNEL: a sound request that this device or build does not do."""


class OutOfMemoryError(FmhaError, MemoryError):
    """ENOMEM, EQUOTA: memory is exhausted, or a limit of this user is reached."""


class UnreachableError(FmhaError, ConnectionError):
    """ECONN, EDEVICE: the daemon or the device's worker cannot be reached, or went away."""


class DeadlineError(FmhaError, TimeoutError):
    """ETIMEDOUT: no answer before the deadline."""


class NotAllowedError(FmhaError, PermissionError):
    """EPERM: this user may not do that."""


_CLASSES = {
    "EINVAL": InvalidError, "ENOTSUP": NotSupportedError, "ENOKERNEL": NotSupportedError,
    "ENOMEM": OutOfMemoryError, "EQUOTA": OutOfMemoryError, "ECONN": UnreachableError,
    "EDEVICE": UnreachableError, "ETIMEDOUT": DeadlineError, "EPERM": NotAllowedError,
}


def invalid(message: str, field: str = "") -> InvalidError:
    return InvalidError("EINVAL", message, field)


def not_supported(message: str, field: str = "") -> NotSupportedError:
    return NotSupportedError("ENOTSUP", message, field)


def native(*parts: str) -> pathlib.Path | None:
    """A file that the wheel carries, or None."""
    path = PACKAGE.joinpath("_native", *parts)
    return path if path.exists() else None


def _load():
    chosen = os.environ.get("FMHA_CLIENT_LIBRARY")
    carried = native("lib", SONAME)
    path = chosen or (str(carried) if carried else SONAME)
    try:
        # At exit the library's object may go before the handles that end by its functions.
        return ffi.dlopen(path, os.RTLD_NOW | os.RTLD_NODELETE)
    except OSError as error:
        raise ImportError(
            f"libfmha_client cannot be loaded ({error}): install it, or name it in FMHA_CLIENT_LIBRARY"
        ) from None


lib = _load()


def text(chars) -> str:
    return ffi.string(chars).decode("utf-8", "replace")


def _ask(_userdata) -> int:
    for _ in range(2):
        pass  # between instructions the interpreter runs the handlers of signals: an exception of theirs ends the wait
    return 0


_raised: list = []  # by a signal's handler during a wait of the main thread


def heed_signals() -> None:
    """Lets Ctrl-C end this thread's waits in the C library, if it is the one that handles signals."""
    global _asked
    if threading.current_thread() is threading.main_thread() and hasattr(lib, "fmha_set_interrupt"):
        _asked = ffi.callback("int(void *)", _ask, error=1, onerror=lambda _kind, error, _trace: _raised.append(error))
        lib.fmha_set_interrupt(_asked, ffi.NULL)


def check(code: int, error) -> None:
    """Raises what @error says when @code is a failure, or what a signal's handler raised meanwhile."""
    if code < 0 or _raised:
        if _raised and threading.current_thread() is threading.main_thread():
            raise _raised.pop()
        if code >= 0:
            return
        name = text(lib.fmha_error_name(code))
        message = text(error.msg) or text(lib.fmha_error_sentence(code))
        raise _CLASSES.get(name, FmhaError)(name, message, text(error.field))


def new_error():
    return ffi.new("struct fmha_error *")


def version() -> str:
    return text(lib.fmha_version())
