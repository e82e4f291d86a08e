# SPDX-License-Identifier: MIT
"""Where compute-sanitizer is."""
import glob
import shutil


def find_sanitizer():
    found = shutil.which("compute-sanitizer")
    places = glob.glob("/usr/local/cuda*/bin/compute-sanitizer") + glob.glob(
        "/usr/local/cuda*/compute-sanitizer/compute-sanitizer")
    return found or (sorted(places)[-1] if places else None)
