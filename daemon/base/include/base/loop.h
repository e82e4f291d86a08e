/* SPDX-License-Identifier: MIT */
/* loop.h: the beginning of a process's loop. */
#ifndef FMHAD_BASE_LOOP_H
#define FMHAD_BASE_LOOP_H

#include <uv.h>

/*
 * uv_loop_init(), which aborts in a process's first loop when there is no pipe for its signals: here whoever
 * has no descriptors is told so.
 * Return: 0 or libuv's error.
 */
int loop_init(uv_loop_t *loop);

#endif
