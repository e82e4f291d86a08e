/* SPDX-License-Identifier: MIT */
/*
 * log.h: one line a call. Where stderr is the journal, lines go there with fields of what they are
 * about, or, when its socket cannot be reached, to stderr with their priority as sd-daemon(3) defines;
 * on a terminal they begin with time and level, and at level debug with what they are about. The level and the name are process-wide: there is
 * one stderr.
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

/* Keeps one misbehaving peer from filling the log. All zero is a fresh one. */
struct log_limit {
	uint64_t window_ns; /* start of the current window */
	uint32_t n_lines, n_suppressed;
};

/* The subject of a line, as fields of the journal. */
enum log_field { LOG_DEVICE = 1, LOG_UID = 2, LOG_PID = 4, LOG_REQUEST = 8 };
struct log_about {
	unsigned int fields; /* which of the next four are given */
	uint32_t device;
	uint32_t uid, pid;  /* of the client */
	uint32_t request;   /* its number on the client's connection */
	const char *kernel; /* NULL: none */
};

extern const char *const log_level_names[]; /* from LOG_LEVEL_ERROR on */

/* @name: kept. */
void log_init(const char *name, enum log_level level);

void log_set_level(enum log_level level);

/* Every line of this process is about @about, too. */
void log_set_process(const struct log_about *about);

void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

void log_write_about(const struct log_about *about, enum log_level level, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

/* At most LOG_LIMIT_LINES lines in LOG_LIMIT_SECONDS; the next window tells how many were dropped.
 */
void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

void log_limited_about(struct log_limit *limit, const struct log_about *about, enum log_level level,
		       const char *format, ...) __attribute__((format(printf, 4, 5)));

#define log_error(...)   log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_write(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_notice(...)  log_write(LOG_LEVEL_NOTICE, __VA_ARGS__)
#define log_info(...)    log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)   log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
