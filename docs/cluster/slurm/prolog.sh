#!/bin/sh
# SPDX-License-Identifier: MIT
# Slurm's TaskProlog: what it prints as "export NAME=VALUE" becomes part of the task's environment. A node whose
# fmhad is not well says so in the job's output; the job goes on, as it may not need it.
socket=${FMHAD_SOCKET:-/run/fmhad/fmhad.sock}
if fmhactl --socket "$socket" --timeout 5 ping >/dev/null 2>&1; then
    echo "export FMHAD_SOCKET=$socket"
else
    echo "print fmhad does not answer on $(uname -n): fmhactl doctor says why"
fi
