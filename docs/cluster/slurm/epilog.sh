#!/bin/sh
# SPDX-License-Identifier: MIT
# Slurm's Epilog, as root: a job's buffers end with its processes, so what its user still has on the node when no
# process of the user is left is a mistake worth a line in the log. Never fails: that would drain the node.
socket=${FMHAD_SOCKET:-/run/fmhad/fmhad.sock}
[ -n "${SLURM_JOB_UID:-}" ] || exit 0
if pgrep -U "$SLURM_JOB_UID" >/dev/null 2>&1; then
    exit 0 # another job of the same user
fi
if fmhactl --socket "$socket" --timeout 5 --json top --interval 0.1 2>/dev/null |
    grep -q "\"uid\":$SLURM_JOB_UID,"; then
    logger -t fmhad-epilog "user $SLURM_JOB_UID has sessions after job ${SLURM_JOB_ID:-?}" || true
fi
exit 0
