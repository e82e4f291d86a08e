/* SPDX-License-Identifier: MIT */
#include <base/log.h>

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <base/clock.h>

static struct {
	const char *name;
	enum log_level level;
	bool journal;
} log_state = {.name = "fmhad", .level = LOG_LEVEL_INFO};

/* JOURNAL_STREAM holds device:inode of the stream that systemd connected; a redirected stderr no
 * longer matches. */
static bool stderr_is_journal(void)
{
	const char *stream = getenv("JOURNAL_STREAM");
	unsigned long long device, inode;
	struct stat st;

	return stream && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
	       fstat(STDERR_FILENO, &st) == 0 && st.st_dev == device && st.st_ino == inode;
}

void log_init(const char *name, enum log_level level)
{
	log_state.name = name;
	log_state.level = level;
	log_state.journal = stderr_is_journal();
}

static void write_line(enum log_level level, const char *format, va_list list)
{
	char line[1024];
	int used, n;

	if (log_state.journal)
		used = snprintf(line, sizeof(line), "<%d>%s: ", level, log_state.name);
	else
		used = snprintf(line, sizeof(line), "%s[%d]: ", log_state.name, (int)getpid());
	n = vsnprintf(line + used, sizeof(line) - (size_t)used - 1, format, list);
	if (n < 0)
		return;
	n += used;
	if (n > (int)sizeof(line) - 2)
		n = (int)sizeof(line) - 2;
	/* A client's name or path must not forge a second line. */
	for (int i = used; i < n; i++)
		if ((unsigned char)line[i] < ' ' || line[i] == 0x7f)
			line[i] = '?';
	line[n++] = '\n';
	/* One write: lines of front and workers on one pipe do not mix. */
	if (write(STDERR_FILENO, line, (size_t)n) < 0)
		return; /* nowhere left to say so */
}

void log_write(enum log_level level, const char *format, ...)
{
	va_list list;

	if (level > log_state.level)
		return;
	va_start(list, format);
	write_line(level, format, list);
	va_end(list);
}

void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
{
	uint64_t now = clock_ns();
	va_list list;

	if (level > log_state.level)
		return;
	if (limit->window_ns == 0 || now - limit->window_ns > LOG_LIMIT_SECONDS * NS_PER_S) {
		if (limit->n_suppressed > 0)
			log_write(level, "%u similar lines suppressed", limit->n_suppressed);
		*limit = (struct log_limit){.window_ns = now};
	}
	if (limit->n_lines >= LOG_LIMIT_LINES) {
		limit->n_suppressed++;
		return;
	}
	limit->n_lines++;
	va_start(list, format);
	write_line(level, format, list);
	va_end(list);
}
