#!/bin/sh
# SPDX-License-Identifier: MIT
# Slurm's Prolog, as root, before a job's first step on a node: what a model will ask for is compiled before anybody waits.
# FMHAD_WARM: the model's config.json, which `fmhactl warm` takes; none: nothing to do. Never fails: that would drain the
# node, and a job does not need it.
socket=${FMHAD_SOCKET:-/run/fmhad/fmhad.sock}
model=${FMHAD_WARM:-/etc/fmhad/warm.json}
[ -r "$model" ] || exit 0
said=$(timeout "${FMHAD_WARM_SECONDS:-120}" fmhactl --socket "$socket" warm --model "$model" 2>&1) ||
    logger -t fmhad-warm "job ${SLURM_JOB_ID:-?}: $said" || true
exit 0
