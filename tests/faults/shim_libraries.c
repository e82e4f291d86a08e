/* SPDX-License-Identifier: MIT */
/*
 * shim_libraries.c: the functions of libuv, msgpack-c and cJSON that the product calls and that can
 * fail, at their own border: what a version fails at that does not do so today.
 *
 * Not here are those that fail for a wrong argument only (uv_timer_init, uv_timer_start, uv_poll_stop,
 * uv_pipe_init, uv_check_*, uv_idle_*, uv_prepare_*, uv_signal_init after the first, ...), nor
 * uv_accept(): it closes what it cannot open, which no stand-in can do for it.
 */
#include "faults.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <msgpack.h>
#include <stdbool.h>
#include <uv.h>

#define SHOWN __attribute__((visibility("default")))

/* What one of these calls of the others, in its own library, does not fail there: uv_spawn() does not look at what
 * uv_signal_start() says, which has nothing that it could lack. */
static _Thread_local bool within;

#define LIBRARY(CLASS, FAILED, TYPE, NAME, PARAMETERS, ARGUMENTS)                                  \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN TYPE NAME PARAMETERS                                                                 \
	{                                                                                          \
		TYPE answer;                                                                       \
                                                                                                   \
		if (within)                                                                        \
			return NEXT(NAME) ARGUMENTS;                                               \
		if (FAULT(CLASS, #NAME, ENOMEM))                                                   \
			return FAILED;                                                             \
		within = true;                                                                     \
		answer = NEXT(NAME) ARGUMENTS;                                                     \
		within = false;                                                                    \
		return answer;                                                                     \
	}

/* ---- libuv ---- */

LIBRARY(UV, UV_ENOMEM, int, uv_loop_init, (uv_loop_t * loop), (loop))
LIBRARY(UV, UV_ENOMEM, int, uv_async_init, (uv_loop_t * loop, uv_async_t *async, uv_async_cb done),
	(loop, async, done))
LIBRARY(UV, UV_ENOMEM, int, uv_poll_init, (uv_loop_t * loop, uv_poll_t *poll, int fd),
	(loop, poll, fd))
LIBRARY(UV, UV_ENOMEM, int, uv_poll_start, (uv_poll_t * poll, int events, uv_poll_cb done),
	(poll, events, done))
LIBRARY(UV, UV_ENOMEM, int, uv_signal_init, (uv_loop_t * loop, uv_signal_t *signal), (loop, signal))
LIBRARY(UV, UV_ENOMEM, int, uv_signal_start, (uv_signal_t * signal, uv_signal_cb done, int number),
	(signal, done, number))
/* Also when it fails the handle is one from then on, which its owner closes. */
DEFINE_NEXT(uv_spawn);
SHOWN int uv_spawn(uv_loop_t *loop, uv_process_t *process, const uv_process_options_t *options)
{
	uv_process_options_t of_nothing = {
		.exit_cb = options->exit_cb, .file = "/", .args = options->args};
	int fails = FAULT(UV, "uv_spawn", ENOMEM), r;

	within = true;
	r = NEXT(uv_spawn)(loop, process, fails ? &of_nothing : options);
	within = false;
	return fails ? UV_ENOMEM : r;
}

LIBRARY(UV, UV_ENOMEM, int, uv_queue_work,
	(uv_loop_t * loop, uv_work_t *work, uv_work_cb run, uv_after_work_cb done),
	(loop, work, run, done))
LIBRARY(UV, UV_ENOMEM, int, uv_pipe_open, (uv_pipe_t * pipe, uv_file fd), (pipe, fd))
LIBRARY(UV, UV_ENOBUFS, int, uv_listen, (uv_stream_t * stream, int backlog, uv_connection_cb done),
	(stream, backlog, done))
LIBRARY(UV, UV_ENOMEM, int, uv_read_start,
	(uv_stream_t * stream, uv_alloc_cb allocate, uv_read_cb done), (stream, allocate, done))
LIBRARY(UV, UV_ENOMEM, int, uv_write,
	(uv_write_t * request, uv_stream_t *stream, const uv_buf_t buffers[], unsigned n,
	 uv_write_cb done),
	(request, stream, buffers, n, done))

/* ---- msgpack-c ---- */

LIBRARY(MSGPACK, NULL, msgpack_zone *, msgpack_zone_new, (size_t size), (size))
LIBRARY(MSGPACK, NULL, void *, msgpack_zone_malloc_expand, (msgpack_zone * zone, size_t size),
	(zone, size))
LIBRARY(MSGPACK, MSGPACK_UNPACK_NOMEM_ERROR, msgpack_unpack_return, msgpack_unpack,
	(const char *data, size_t n, size_t *at, msgpack_zone *zone, msgpack_object *result),
	(data, n, at, zone, result))
LIBRARY(MSGPACK, MSGPACK_UNPACK_NOMEM_ERROR, msgpack_unpack_return, msgpack_unpack_next,
	(msgpack_unpacked * result, const char *data, size_t n, size_t *at), (result, data, n, at))

/*
 * cJSON fails for want of memory only, and whoever made its allocator hears of that there: so these
 * calls go on, without memory. What makes and adds single items is of the class of memory.
 */
#define STARVED(TYPE, NAME, PARAMETERS, ARGUMENTS)                                                 \
	DEFINE_NEXT(NAME);                                                                         \
	SHOWN TYPE NAME PARAMETERS                                                                 \
	{                                                                                          \
		bool starved = FAULT(CJSON, #NAME, ENOMEM) < 0;                                    \
		TYPE result;                                                                       \
                                                                                                   \
		if (starved)                                                                       \
			fault_starve();                                                            \
		result = NEXT(NAME) ARGUMENTS;                                                     \
		if (starved)                                                                       \
			fault_feed();                                                              \
		return result;                                                                     \
	}

STARVED(cJSON *, cJSON_Duplicate, (const cJSON *item, cJSON_bool recurse), (item, recurse))
STARVED(cJSON *, cJSON_Parse, (const char *text), (text))
STARVED(cJSON *, cJSON_ParseWithLength, (const char *text, size_t n), (text, n))
STARVED(cJSON *, cJSON_ParseWithOpts, (const char *text, const char **ret_end, cJSON_bool ended),
	(text, ret_end, ended))
STARVED(cJSON *, cJSON_ParseWithLengthOpts,
	(const char *text, size_t n, const char **ret_end, cJSON_bool ended),
	(text, n, ret_end, ended))
STARVED(char *, cJSON_Print, (const cJSON *item), (item))
STARVED(char *, cJSON_PrintUnformatted, (const cJSON *item), (item))
