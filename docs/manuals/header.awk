# SPDX-License-Identifier: MIT
# A public header as roff: each function's declaration and the comment before it.
function escaped(text) {
    gsub(/\\/, "\\e", text)
    gsub(/-/, "\\-", text)
    gsub(/\t/, "    ", text)
    sub(/^[.']/, "\\\\\\&&", text)
    return text
}

/^\/\*/ { comment = ""; in_comment = 1 }
in_comment {
    line = $0
    sub(/ *\*\/$/, "", line)
    sub(/^\/\*\*? ?/, "", line)
    sub(/^ \* ?/, "", line)
    if (line != "" || (comment != "" && !/\*\/$/))
        comment = comment escaped(line) "\n"
}
in_comment && /\*\/$/ { in_comment = 0; next }
in_comment { next }

/^FMHA_API/ { declaration = "" }
/^FMHA_API/, /;$/ {
    line = $0
    sub(/^FMHA_API /, "", line)
    declaration = declaration escaped(line) "\n"
    if ($0 ~ /;$/) {
        name = declaration
        sub(/\(.*/, "", name)
        sub(/.*[ *]/, "", name)
        sub(/\n$/, "", declaration)
        printf ".SS %s()\n.nf\n\\fB%s\\fR\n.fi\n", name, declaration
        if (comment != "")
            printf ".PP\n.nf\n%s.fi\n", comment
        comment = ""
    }
    next
}
/^$/ { comment = "" }
