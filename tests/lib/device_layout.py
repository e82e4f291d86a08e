# SPDX-License-Identifier: MIT
"""Device code whose lines are above 100 columns: clang-format breaks those, and this the comments.

    device_layout.py [--check]

All else stays as it is written: a layout of everything would pull tables, assembly and one-line methods apart. What no tool
can break (a string, a macro's line) stays long. --check changes nothing and names the files that would be.
"""
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS = 100
COMMENT = re.compile(r"(\t*)(/\*| \*)( .*?)( \*/)?$")


TRAILING = re.compile(r"(\t*)(\S.*\S) (/\* [^*]* \*/)")


def is_long(line):
    return len(line.expandtabs(8)) > COLUMNS


def wrapped(line):
    """A line of nothing but a comment."""
    indent, start, text, end = COMMENT.fullmatch(line).groups()
    room = COLUMNS - len((indent + start).expandtabs(8))
    lines = textwrap.wrap(text.strip() + (end or ""), room - 1, break_long_words=False, break_on_hyphens=False)
    if lines[-1] == "*/":
        lines[-2:] = [lines[-2] + " */"]
    marks = [start] + [" *"] * (len(lines) - 1)
    return [f"{indent}{mark} {text}" for mark, text in zip(marks, lines)]


def apart(lines):
    """A comment behind a statement that is too long with it stands above."""
    for n, line in enumerate(lines):
        found = TRAILING.fullmatch(line) if is_long(line) else None
        begins = n == 0 or not lines[n - 1].strip() or lines[n - 1].rstrip().endswith((";", "{", "}", ":", "*/", ")", "UNROLL", "else"))
        if found and begins and not line.lstrip().startswith(("#", "/*")):
            yield from (found[1] + found[3], found[1] + found[2])
        else:
            yield line


def joined(lines):
    """Long lines of comments broken; a rest goes to the next line's front, as far as the paragraph goes."""
    lines, at = list(lines), 0
    while at < len(lines):
        found = COMMENT.fullmatch(lines[at]) if is_long(lines[at]) else None
        if found:
            parts = wrapped(lines[at])
            after = COMMENT.fullmatch(lines[at + 1]) if at + 1 < len(lines) and not found[4] else None
            if len(parts) > 1 and after and after[2] == " *" and re.match(r" \S", after[3]) and not re.match(r" ([-*]|\w+:) ", after[3]):
                rest = " ".join(part.strip()[2:] for part in parts[1:])
                lines[at:at + 2] = [parts[0], f"{after[1]} * {rest}{after[3]}{after[4] or ''}"]
            else:
                lines[at:at + 1] = parts
        at += 1
    return lines


def laid_out(path, text):
    before = None
    while text != before:
        before, text = text, "\n".join(joined(apart(text.split("\n"))))
        numbers = [n for n, line in enumerate(text.split("\n"), 1) if is_long(line) and not COMMENT.fullmatch(line) and not line.endswith("\\")]
        if numbers:
            command = ["clang-format", f"--assume-filename={path.with_suffix('.h') if path.suffix == '.hip' else path}"]
            text = subprocess.run(command + [f"--lines={n}:{n}" for n in numbers], input=text, capture_output=True, text=True, check=True).stdout
    return text


def main():
    bad, check = [], sys.argv[1:] == ["--check"]
    for path in sorted((ROOT / "kernels/gpu").rglob("*")):
        if path.suffix in (".h", ".hip", ".c"):
            old = path.read_text()
            new = laid_out(path, old)
            if new != old:
                bad.append(path.relative_to(ROOT))
                if not check:
                    path.write_text(new)
    if check:
        for path in bad:
            print(f"{path}: lines above {COLUMNS} columns; ./dev format breaks them")
    return bool(check and bad)


if __name__ == "__main__":
    sys.exit(main())
