/* SPDX-License-Identifier: MIT */
/*
 * log.h: one line a call on stderr. When stderr is the journal, each line starts with its priority
 * as sd-daemon(3) defines; otherwise with the process's name. The level and the name are
 * process-wide: there is one stderr.
 */
#ifndef FMHAD_BASE_LOG_H
#define FMHAD_BASE_LOG_H

#include <stdint.h>

/* Priorities of syslog(3). */
enum log_level {
	LOG_LEVEL_ERROR = 3,
	LOG_LEVEL_WARNING = 4,
	LOG_LEVEL_NOTICE = 5,
	LOG_LEVEL_INFO = 6,
	LOG_LEVEL_DEBUG = 7
};

#define LOG_LIMIT_LINES   10
#define LOG_LIMIT_SECONDS 30

/* What keeps one misbehaving peer from filling the log. All zero is a fresh one. */
struct log_limit {
	uint64_t window_ns; /* start of the current window */
	uint32_t n_lines, n_suppressed;
};

/* @name: kept. */
void log_init(const char *name, enum log_level level);

void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* At most LOG_LIMIT_LINES lines in LOG_LIMIT_SECONDS; the next window tells how many were dropped.
 */
void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

#define log_error(...)   log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_write(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_notice(...)  log_write(LOG_LEVEL_NOTICE, __VA_ARGS__)
#define log_info(...)    log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)   log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
