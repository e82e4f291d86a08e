/* SPDX-License-Identifier: MIT */
/* error.h: filling and printing struct fmha_error. */
#ifndef PROTO_ERROR_H
#define PROTO_ERROR_H

#include <fmha/base.h>

/* Fills @err (may be NULL) and returns @code, so that failing is one line. */
int fmha_error_set(struct fmha_error *err, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* The same, naming the offending field. */
int fmha_error_set_field(struct fmha_error *err, int code, const char *field, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));

/* "FIELD: why", FMHA_EINVAL: what somebody gave cannot be. */
int fmha_error_refuse(struct fmha_error *err, const char *field, const char *why);

#ifdef __clang_analyzer__
/* It cannot look into another file: codes are negative, so what fails never looks like success. */
#define fmha_error_set(err, code, ...)                                                             \
	((void)fmha_error_set(err, code, __VA_ARGS__), (code) < 0 ? (code) : -1)
#define fmha_error_set_field(err, code, ...)                                                       \
	((void)fmha_error_set_field(err, code, __VA_ARGS__), (code) < 0 ? (code) : -1)
#define fmha_error_refuse(err, field, why) ((void)fmha_error_refuse(err, field, why), FMHA_EINVAL)
#endif

/* "EINVAL"; "EUNKNOWN" for a code that is not in the list. */
const char *fmha_error_name(int code);

/* The list's sentence for @code. */
const char *fmha_error_sentence(int code);

#endif
