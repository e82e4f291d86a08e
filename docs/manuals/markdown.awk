# SPDX-License-Identifier: MIT
# As much of Markdown as our pages have, as roff: headings, paragraphs, code, lists, tables.
function escaped(text) {
    gsub(/\\/, "\\e", text)
    gsub(/-/, "\\-", text)
    sub(/^[.']/, "\\\\\\&&", text)
    return text
}

# `code` in bold, without the marks of emphasis.
function prose(text,    parts, n, i, result) {
    n = split(escaped(text), parts, "`")
    for (i = 1; i <= n; i++) {
        if (i % 2 == 1)
            gsub(/\*/, "", parts[i])
        result = result (i % 2 == 1 ? parts[i] : "\\fB" parts[i] "\\fR")
    }
    return result
}

function literal(on) {
    if (on && !is_literal)
        print ".PP\n.nf"
    if (!on && is_literal)
        print ".fi\n.PP"
    is_literal = on
}

/^<!--/ { next }
/^```/ { fenced = !fenced; literal(fenced); next }
fenced { print escaped($0); next }
/^# / { next }
/^## / { literal(0); print ".SH " toupper(prose(substr($0, 4))); next }
/^###* / { literal(0); sub(/^#+ /, ""); print ".SS " prose($0); next }
/^\|[-| :]*\|$/ { next }
/^\|/ { literal(1); gsub(/^\| *| *\|$/, ""); gsub(/ *\| */, "    "); print prose($0); next }
/^    / { literal(1); print escaped($0); next }
/^$/ { if (is_literal) literal(0); else print ".PP"; next }
/^- / { literal(0); print ".IP \\(bu 2"; print prose(substr($0, 3)); next }
{ literal(0); sub(/^ +/, ""); print prose($0) }
END { literal(0) }
