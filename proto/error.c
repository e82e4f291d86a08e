/* SPDX-License-Identifier: MIT */
#include <proto/error.h>

#include <stdarg.h>
#include <stdio.h>

/* What the header gives the static analyzer instead. */
#undef fmha_error_set
#undef fmha_error_set_field
#undef fmha_error_refuse

static void error_fill(struct fmha_error *err, int code, const char *field, const char *fmt,
		       va_list args)
{
	err->code = code;
	(void)snprintf(err->field, sizeof(err->field), "%s", field);
	(void)vsnprintf(err->msg, sizeof(err->msg), fmt, args);
}

int fmha_error_set(struct fmha_error *err, int code, const char *fmt, ...)
{
	va_list args;

	if (!err)
		return code;
	va_start(args, fmt);
	error_fill(err, code, "", fmt, args);
	va_end(args);
	return code;
}

int fmha_error_set_field(struct fmha_error *err, int code, const char *field, const char *fmt, ...)
{
	va_list args;

	if (!err)
		return code;
	va_start(args, fmt);
	error_fill(err, code, field, fmt, args);
	va_end(args);
	return code;
}

int fmha_error_refuse(struct fmha_error *err, const char *field, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: %s", field, why);
}

const char *fmha_error_name(int code)
{
	switch (code) {
#define ERROR_NAME(name, value, sentence)                                                          \
	case FMHA_##name:                                                                          \
		return #name;
		FMHA_ERRORS(ERROR_NAME)
#undef ERROR_NAME
	case FMHA_OK:
		return "OK";
	default:
		return "EUNKNOWN";
	}
}

const char *fmha_error_sentence(int code)
{
	switch (code) {
#define ERROR_SENTENCE(name, value, sentence)                                                      \
	case FMHA_##name:                                                                          \
		return sentence;
		FMHA_ERRORS(ERROR_SENTENCE)
#undef ERROR_SENTENCE
	case FMHA_OK:
		return "success";
	default:
		return "an error code that this build does not know";
	}
}
