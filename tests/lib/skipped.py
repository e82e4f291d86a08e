# SPDX-License-Identifier: MIT
"""Which tests ctest skipped, and why: what they printed last.

    skipped.py build/release/ctest.xml      (ctest --output-junit)
"""
import sys
import xml.etree.ElementTree


def reason(case):
    """cmocka tells which behaviour it skipped, a program of our own ends with its reason."""
    lines = [line.strip() for line in (case.findtext("system-out") or "").splitlines()]
    told = [line for line in lines if "SKIPPED" in line or "skip" in line.lower()]
    return "; ".join(told) or next((line for line in reversed(lines) if line), "no reason given")


def main():
    for case in xml.etree.ElementTree.parse(sys.argv[1]).iter("testcase"):
        if case.find("skipped") is not None:
            print(f"skipped: {case.get('name')}: {reason(case)}")


if __name__ == "__main__":
    main()
