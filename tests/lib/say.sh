# SPDX-License-Identifier: MIT
# Headings of scripts: bold on a terminal, plain text elsewhere. Sourced.

bold() { # fd words...
    local fd=$1
    shift
    if [ -t "$fd" ]; then
        printf '\033[1m%s\033[0m\n' "$*" >&"$fd"
    else
        printf '%s\n' "$*" >&"$fd"
    fi
}

say() { bold 2 "== $*"; }
