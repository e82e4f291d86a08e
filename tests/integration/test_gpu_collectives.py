# SPDX-License-Identifier: MIT
"""What all lanes have to call together is not called by some. On AMD a lane may ask alone for what its wave has in common; on
NVIDIA wave_id() and its like wait for every lane, for ever, and no emulator of AMD's shows it."""
import re

import fmhad
import pytest

TOGETHER = re.compile(r"\b(wave_id|shuffle_\w+|any_of_wave|sum_of_wave|block_sync|wave_sync)\(")
BY_LANE = re.compile(r"\bif (?:constexpr )?\((?=[^{};]*\b(?:lane_id|thread_id)\(\))")


def behind(text, at, opening, closing):
    """The place behind the bracket that closes the one before @at."""
    depth = 1
    while depth:
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        at += 1
    return at


def of_some_lanes(text):
    """(line, name) of calls inside of what only some lanes of a block do."""
    for found in BY_LANE.finditer(text):
        start = behind(text, found.end(), "(", ")")
        start += len(text[start:]) - len(text[start:].lstrip())
        end = behind(text, start + 1, "{", "}") if text[start] == "{" else text.index(";", start)
        call = TOGETHER.search(text, start, end)
        if call:
            yield text.count("\n", 0, call.start()) + 1, call.group(1)


def headers():
    return sorted((fmhad.ROOT / "kernels/gpu").rglob("*.h"))


def test_lanes_wait_for_nobody_that_does_not_come():
    found = {str(path.relative_to(fmhad.ROOT)): calls for path in headers() if (calls := list(of_some_lanes(path.read_text())))}
    assert len(headers()) > 40 and found == {}


@pytest.mark.parametrize("text, found", [
    ("if (lane_id() == 0)\n\tbox[wave_id()] = *this;\n", [(2, "wave_id")]),
    ("if (thread_id() < n) {\n\tx = 1;\n\tblock_sync();\n}\nwave_sync();", [(3, "block_sync")]),
    ("i32 wave = wave_id();\nif (lane_id() == 0)\n\tbox[wave] = *this;\nblock_sync();", []),
])
def test_the_scan_itself(text, found):
    assert list(of_some_lanes(text)) == found
