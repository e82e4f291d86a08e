# SPDX-License-Identifier: MIT
"""Whose turn it is where only a share of something is looked at: another share after each commit, or each day where the
tree is no clone or git is not here."""
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def turn(root=ROOT):
    try:
        done = subprocess.run(["git", "-C", str(root), "rev-list", "--count", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return int(time.time()) // 86400
    return int(done.stdout) if done.returncode == 0 else int(time.time()) // 86400
