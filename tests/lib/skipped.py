# SPDX-License-Identifier: MIT
"""Which tests ctest skipped, and why: what they printed last.

    skipped.py build/release/ctest.xml      (ctest --output-junit)
"""
import sys
import xml.etree.ElementTree


def report(case):
    """A line about a program that was skipped, or about what cmocka skipped inside one; else None."""
    name = case.get("name")
    lines = [line.strip() for line in (case.findtext("system-out") or "").splitlines() if line.strip()]
    if case.find("skipped") is not None:
        return f"skipped: {name}: {lines[-1] if lines else 'no reason given'}"
    # Of cmocka's own lines only this one, which names the behaviour.
    told = [
        line
        for line in lines
        if (line.startswith("[  SKIPPED ]") and "listed below" not in line) or ("skipped" in line and not line.startswith("["))
    ]
    return f"skipped in {name}: {'; '.join(dict.fromkeys(told))}" if told else None


def main():
    for case in xml.etree.ElementTree.parse(sys.argv[1]).iter("testcase"):
        line = report(case)
        if line:
            print(line)


if __name__ == "__main__":
    main()
