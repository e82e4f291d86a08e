/* SPDX-License-Identifier: MIT */
#include "ctl.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#define MAX_DOCUMENT (64 << 20) /* what the daemon takes */

int ctl_usage_error(const char *fmt, ...)
{
	va_list args;

	(void)fputs("fmhactl: ", stderr);
	va_start(args, fmt);
	(void)vfprintf(stderr, fmt, args);
	va_end(args);
	(void)fputc('\n', stderr);
	return CTL_USAGE;
}

int ctl_error(const struct fmha_error *err)
{
	(void)fprintf(stderr, "fmhactl: %s%s%s (%s)\n",
		      err->msg[0] ? err->msg : fmha_error_sentence(err->code),
		      err->field[0] ? ", field " : "", err->field, fmha_error_name(err->code));
	switch (err->code) {
	case FMHA_OK:
		return CTL_OK;
	case FMHA_ECONN:
	case FMHA_EPERM:
	case FMHA_EVERSION:
	case FMHA_EPROTO:
		return CTL_UNREACHABLE;
	case FMHA_EIO:
		return CTL_IO;
	case FMHA_ETIMEDOUT:
		return CTL_LATE;
	default:
		return CTL_REFUSED;
	}
}

int ctl_parse_int(const char *option, const char *text, int64_t min, int64_t max,
		  int64_t *ret_value)
{
	long long value;
	char *end;

	errno = 0;
	value = strtoll(text, &end, 0);
	if (end == text || *end || errno)
		return ctl_usage_error("%s '%s': not a whole number", option, text);
	if (value < min || value > max)
		return ctl_usage_error("%s %lld: not in %lld..%lld", option, value, (long long)min,
				       (long long)max);
	*ret_value = value;
	return 0;
}

int ctl_parse_int32(const char *option, const char *text, int32_t min, int32_t max,
		    int32_t *ret_value)
{
	int64_t value = 0;
	int r = ctl_parse_int(option, text, min, max, &value);

	if (r == 0)
		*ret_value = (int32_t)value;
	return r;
}

int ctl_parse_double(const char *option, const char *text, double *ret_value)
{
	double value;
	char *end;

	errno = 0;
	value = strtod(text, &end);
	if (end == text || *end || !isfinite(value))
		return ctl_usage_error("%s '%s': not a finite number", option, text);
	*ret_value = value;
	return 0;
}

const struct cli_option ctl_target_options[] = {
	{"socket", CTL_OPT_SOCKET, "PATH", "the daemon's socket (default: see `fmhactl help`)",
	 CLI_OWN},
	{"device", CTL_OPT_DEVICE, "N", "index of the device (default: the first that is ready)",
	 CLI_OWN},
	{"timeout", CTL_OPT_TIMEOUT, "SECS", "give up after this long (default 30)", CLI_OWN},
	CLI_END};

const struct cli_option ctl_json_option[] = {
	{"json", CTL_OPT_JSON, NULL, "the answer as JSON", CLI_OWN}, CLI_END};

const char *ctl_take_verb(int *argc, char ***argv)
{
	const char *verb;

	if (*argc < 2 || (*argv)[1][0] == '-')
		return "";
	verb = (*argv)[1];
	(*argv)[1] = (*argv)[0]; /* cli_next() speaks in this name */
	(*argc)--;
	(*argv)++;
	return verb;
}

int ctl_parse_word(const char *option, const char *text, const struct ctl_word *words,
		   uint32_t *ret_value)
{
	for (const struct ctl_word *w = words; w->text; w++) {
		if (!strcmp(text, w->text)) {
			*ret_value = w->value;
			return 0;
		}
	}
	(void)fprintf(stderr, "fmhactl: %s '%s': not one of", option, text);
	for (const struct ctl_word *w = words; w->text; w++)
		(void)fprintf(stderr, " %s", w->text);
	(void)fputc('\n', stderr);
	return CTL_USAGE;
}

int ctl_target_option(struct ctl_target *target, int option, const char *value)
{
	int64_t number = 0;
	double seconds = 0;
	int r;

	switch (option) {
	case CTL_OPT_SOCKET:
		target->socket = value;
		return 0;
	case CTL_OPT_TIMEOUT:
		r = ctl_parse_double("--timeout", value, &seconds);
		if (r == 0 && (seconds < 0.001 || seconds > 1e6))
			return ctl_usage_error("--timeout %s: 0.001 to 1000000 seconds", value);
		if (r == 0)
			target->timeout_ms = (uint32_t)(seconds * 1000);
		return r;
	case CTL_OPT_DEVICE:
		r = ctl_parse_int("--device", value, 0, 1000, &number);
		if (r == 0)
			target->device = (uint32_t)number;
		return r;
	case CTL_OPT_JSON:
		target->json = true;
		return 0;
	default: /* cli_next() has said what is wrong */
		return CTL_USAGE;
	}
}

int ctl_options_before(const struct ctl_command *command, int argc, char **argv,
		       struct ctl_target *target, ctl_take take, void *owner)
{
	int option, r = 0;

	while (r == 0 && (option = cli_next(&command->usage, argc, argv, owner)) != -1) {
		bool common = option == '?' || (option >= CTL_OPT_SOCKET && option <= CTL_OPT_JSON);

		r = common || !take ? ctl_target_option(target, option, optarg)
				    : take(owner, option, optarg);
	}
	return r;
}

int ctl_options(const struct ctl_command *command, int argc, char **argv, struct ctl_target *target,
		ctl_take take, void *owner)
{
	int r = ctl_options_before(command, argc, argv, target, take, owner);

	if (r == 0 && optind < argc)
		return ctl_usage_error("%s: what is '%s'?", strchr(command->usage.name, ' ') + 1,
				       argv[optind]);
	return r;
}

int ctl_connect(const struct ctl_target *target, struct fmha_client **ret_client)
{
	const struct fmha_client_options options = {.struct_size = sizeof(options),
						    .timeout_ms = target->timeout_ms,
						    .path = target->socket,
						    .name = "fmhactl"};
	struct fmha_error err = {0};

	if (fmha_connect(&options, ret_client, &err) < 0)
		return ctl_error(&err);
	return 0;
}

int ctl_open(const struct ctl_target *target, struct fmha_client **ret_client,
	     struct fmha_device **ret_device)
{
	struct fmha_error err = {0};
	int r = ctl_connect(target, ret_client);

	if (r != 0)
		return r;
	if (fmha_device_open(*ret_client, target->device, ret_device, &err) < 0) {
		*ret_client = fmha_client_free(*ret_client);
		return ctl_error(&err);
	}
	return 0;
}

void ctl_client_freep(struct fmha_client **client)
{
	*client = fmha_client_free(*client);
}

void ctl_device_freep(struct fmha_device **device)
{
	*device = fmha_device_free(*device);
}

int ctl_print_json(cJSON *json)
{
	char *text = cJSON_PrintUnformatted(json);
	int r = text && puts(text) >= 0 ? CTL_OK : CTL_IO;

	cJSON_free(text);
	cJSON_Delete(json);
	return r;
}

cJSON *ctl_read_json(const char *path)
{
	FILE *file = fopen(path, "re");
	size_t capacity = 0;
	char *text = NULL;
	ssize_t n = file ? getdelim(&text, &capacity, '\0', file) : -1;
	cJSON *root = n > 0 ? cJSON_ParseWithLength(text, (size_t)n) : NULL;

	if (!root)
		(void)fprintf(stderr, "fmhactl: %s: %s\n", path,
			      file ? "no JSON" : strerror(errno));
	if (file)
		(void)fclose(file);
	free(text);
	return root;
}

int64_t ctl_now_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ", 3 min 20 s left": as the part that is done went. */
static const char *time_left(const struct ctl_progress *progress, int64_t now, uint64_t done,
			     uint64_t total, char text[48])
{
	double seconds = (double)(now - progress->started_ns) / 1e9;

	text[0] = '\0';
	if (progress->shows_time_left && done > 0) {
		seconds *= (double)(total - done) / (double)done;
		(void)snprintf(text, 48, ", %.0f min %02.0f s left", floor(seconds / 60),
			       fmod(seconds, 60));
	}
	return text;
}

void ctl_progress(struct ctl_progress *progress, uint64_t done, uint64_t total)
{
	int64_t now = ctl_now_ns();
	char left[48];

	if (progress->started_ns == 0)
		progress->started_ns = now;
	if (now - progress->started_ns < 1000000000 || now - progress->drawn_ns < 100000000 ||
	    !isatty(STDERR_FILENO))
		return;
	progress->drawn_ns = now;
	progress->visible = true;
	if (total > 0)
		(void)fprintf(stderr, "\r\033[K%s: %llu of %llu (%.0f %%)%s", progress->title,
			      (unsigned long long)done, (unsigned long long)total,
			      100.0 * (double)done / (double)total,
			      time_left(progress, now, done, total, left));
	else
		(void)fprintf(stderr, "\r\033[K%s: %llu", progress->title,
			      (unsigned long long)done);
	(void)fflush(stderr);
}

void ctl_progress_end(struct ctl_progress *progress)
{
	if (progress->visible)
		(void)fputs("\r\033[K", stderr);
	progress->visible = false;
}

int ctl_file_error(const char *path)
{
	(void)fprintf(stderr, "fmhactl: %s: %s\n", path, strerror(errno));
	return CTL_IO;
}

int ctl_replace_file(const char *path, void (*print)(FILE *out, const void *what), const void *what)
{
	char *beside = NULL;
	FILE *file = NULL;
	bool written = false;
	int r = 0;

	if (asprintf(&beside, "%s.%d", path, (int)getpid()) < 0)
		return ctl_usage_error("out of memory");
	file = fopen(beside, "we");
	if (file) {
		print(file, what);
		written = !ferror(file);
		written = fclose(file) == 0 && written && rename(beside, path) == 0;
	}
	if (!written) {
		r = ctl_file_error(path);
		(void)unlink(beside);
	}
	free(beside);
	return r;
}

int ctl_read_file(const char *path, char **ret_text, size_t *ret_n)
{
	FILE *file = fopen(path, "re");
	struct stat st;
	char *text;
	size_t n;

	if (!file || fstat(fileno(file), &st) < 0) {
		if (file)
			(void)fclose(file);
		return ctl_file_error(path);
	}
	if (!S_ISREG(st.st_mode) || st.st_size == 0 || st.st_size > MAX_DOCUMENT) {
		(void)fclose(file);
		(void)fprintf(stderr, "fmhactl: %s: not a file of 1 byte to %d MiB\n", path,
			      MAX_DOCUMENT >> 20);
		return CTL_IO;
	}
	n = (size_t)st.st_size;
	text = malloc(n);
	if (!text || fread(text, 1, n, file) != n) {
		free(text);
		(void)fclose(file);
		return ctl_file_error(path);
	}
	(void)fclose(file);
	*ret_text = text;
	*ret_n = n;
	return 0;
}

int ctl_ask_status(const struct ctl_target *target, char **ret_json)
{
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	struct fmha_error err = {0};
	int r = ctl_connect(target, &client);

	if (r != 0)
		return r;
	return fmha_client_status(client, ret_json, &err) < 0 ? ctl_error(&err) : CTL_OK;
}
