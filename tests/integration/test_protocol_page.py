# SPDX-License-Identifier: MIT
"""PROTOCOL.md's golden messages, read and written by the stock msgpack package."""
import pathlib
import re

import msgpack
import pytest

import fmha_wire

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "proto/PROTOCOL.md").read_text()


def goldens():
    for title, dump in re.findall(r"```golden (.+)\n((?:[0-9a-f]{4}  .*\n)+)```", PAGE):
        data = b""
        for line in dump.splitlines():
            data += bytes.fromhex(line[6 : 6 + 48])
        yield title, data


@pytest.mark.parametrize("title,data", goldens(), ids=lambda value: value if isinstance(value, str) else "")
def test_golden(title, data):
    payload = msgpack.unpackb(data)
    message = msgpack.unpackb(payload, raw=False)
    assert message[0] == {"request": 0, "notification": 2}.get(title.split()[0], 1)
    assert len(message) == (3 if message[0] == 2 else 4)
    # Floats of a problem are single, which is not Python's default.
    packed = msgpack.packb(message, use_bin_type=True, use_single_float=b"\xca" in payload)
    assert msgpack.packb(packed, use_bin_type=True) == data


def test_there_are_goldens():
    assert len(list(goldens())) >= 10


def test_errors_have_a_code_and_a_name():
    (error,) = [data for title, data in goldens() if title.startswith("error")]
    message = msgpack.unpackb(msgpack.unpackb(error), raw=False)
    assert str(fmha_wire.WireError(message[2])) == "EINVAL: hdim_q 264: above 256"
