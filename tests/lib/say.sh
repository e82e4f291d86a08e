# SPDX-License-Identifier: MIT
# What scripts say while they work: headings, bold on a terminal and plain text elsewhere; progress of what is
# silent by itself; what each step took. Sourced.

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

# A silent command: every FMHA_PROGRESS seconds what it printed last, all of its output when it fails.
quietly() { # what command...
    local what=$1 start=$SECONDS status=0 log told
    shift
    log=$(mktemp)
    (
        while sleep "${FMHA_PROGRESS:-8}"; do
            told=$(tail -n 1 "$log" | tr '\r' '\n' | tail -n 1 | cut -c 1-100)
            echo "   $what: $((SECONDS - start)) s${told:+: $told}" >&2
        done
    ) &
    local teller=$!
    "$@" >"$log" 2>&1 || status=$?
    kill "$teller"
    wait "$teller" 2>/dev/null || true
    [ "$status" -eq 0 ] || cat "$log" >&2
    rm -f "$log"
    return "$status"
}

# A step whose time and end go into the table that tell_times prints. FMHA_TIMES: the file between processes.
timed() { # name command...
    local name=$1 start=$SECONDS status=0
    shift
    "$@" || status=$?
    [ -z "${FMHA_TIMES:-}" ] ||
        printf '%s\t%d\t%s\n' "$name" $((SECONDS - start)) "$([ "$status" -eq 0 ] && echo passed || echo FAILED)" >>"$FMHA_TIMES"
    return "$status"
}

# Parts of a step, named "step: part", stand before it, as they ended.
tell_times() {
    awk -F '\t' '
        { printf "   %-40s %6d s  %s\n", ($1 ~ /: /? "  " : "") $1, $2, $3; if ($1 !~ /: /) sum += $2 }
        END { printf "   %-40s %6d s\n", "in all", sum }' "$FMHA_TIMES" >&2
}
