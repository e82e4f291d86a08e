# SPDX-License-Identifier: MIT
"""Says how far a loop is that prints nothing while all is well."""
import sys
import time

SECONDS = 8  # between two lines


def told(items, n, what, clock=time.monotonic, out=sys.stderr):
    """The items; every few seconds how many of them are done."""
    last = clock()
    for done, item in enumerate(items):
        if clock() - last > SECONDS:
            last = clock()
            print(f"   {what}: {done} of {n}", file=out, flush=True)
        yield item
