/* SPDX-License-Identifier: MIT */
#include <base/log.h>

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <base/clock.h>

#define LINE_BYTES 1024

enum sink { SINK_PLAIN, SINK_TERMINAL, SINK_JOURNAL };

static struct {
	const char *name;
	enum log_level level;
	enum sink sink;
	int journal_fd; /* -1: the journal is reached by lines on stderr */
	struct log_about process;
} log_state = {.name = "fmhad", .level = LOG_LEVEL_INFO, .journal_fd = -1};

const char *const log_level_names[] = {[LOG_LEVEL_ERROR] = "error",
				       [LOG_LEVEL_WARNING] = "warning",
				       [LOG_LEVEL_NOTICE] = "notice",
				       [LOG_LEVEL_INFO] = "info",
				       [LOG_LEVEL_DEBUG] = "debug"};

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

/* The journal's own socket takes fields; systemd.journal-fields(7). */
static int connect_journal(void)
{
	const char *path = getenv("FMHAD_JOURNAL_SOCKET"); /* of tests */
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd;

	(void)snprintf(address.sun_path, sizeof(address.sun_path), "%s",
		       path ? path : "/run/systemd/journal/socket");
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		(void)close(fd);
		return -1;
	}
	return fd;
}

void log_init(const char *name, enum log_level level)
{
	log_state.name = name;
	log_state.level = level;
	log_state.sink = stderr_is_journal()     ? SINK_JOURNAL
			 : isatty(STDERR_FILENO) ? SINK_TERMINAL
						 : SINK_PLAIN;
	if (log_state.sink == SINK_JOURNAL && log_state.journal_fd < 0)
		log_state.journal_fd = connect_journal();
}

void log_set_level(enum log_level level)
{
	log_state.level = level;
}

void log_set_process(const struct log_about *about)
{
	log_state.process = *about;
}

static bool send_to_journal(enum log_level level, const struct log_about *about,
			    const char *message)
{
	const struct log_about *process = &log_state.process;
	unsigned int fields = about->fields | process->fields;
	uint32_t device = about->fields & LOG_DEVICE ? about->device : process->device;
	char text[LINE_BYTES + 512];
	int n = snprintf(text, sizeof(text), "PRIORITY=%d\nSYSLOG_IDENTIFIER=%s\n", level,
			 log_state.name);

	if (log_state.journal_fd < 0)
		return false;
	if (fields & LOG_DEVICE)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "FMHA_DEVICE=%u\n", device);
	if (fields & LOG_UID)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "FMHA_CLIENT_UID=%u\n",
			      about->uid);
	if (fields & LOG_PID)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "FMHA_CLIENT_PID=%u\n",
			      about->pid);
	if (fields & LOG_REQUEST)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "FMHA_REQUEST=%u\n",
			      about->request);
	if (about->kernel)
		n += snprintf(text + n, sizeof(text) - (size_t)n, "FMHA_KERNEL=%.256s\n",
			      about->kernel);
	n += snprintf(text + n, sizeof(text) - (size_t)n, "MESSAGE=%s\n", message);
	return send(log_state.journal_fd, text, (size_t)n, MSG_NOSIGNAL) == n;
}

/* What a line on stderr begins with. */
static int print_head(char line[LINE_BYTES], enum log_level level)
{
	struct timespec now;
	struct tm local;
	char time[32];

	switch (log_state.sink) {
	case SINK_JOURNAL:
		return snprintf(line, LINE_BYTES, "<%d>%s: ", level, log_state.name);
	case SINK_TERMINAL:
	case SINK_PLAIN: /* a file may be read on another day */
		break;
	}
	(void)clock_gettime(CLOCK_REALTIME, &now);
	(void)strftime(time, sizeof(time),
		       log_state.sink == SINK_TERMINAL ? "%H:%M:%S" : "%Y-%m-%d %H:%M:%S",
		       localtime_r(&now.tv_sec, &local));
	return snprintf(line, LINE_BYTES, "%s.%03ld %-7s %s[%d]: ", time, now.tv_nsec / 1000000,
			log_level_names[level], log_state.name, (int)getpid());
}

/* What the line is about, for people who look for a reason. */
static int print_about(char *line, size_t room, const struct log_about *about)
{
	const struct {
		enum log_field field;
		const char *name;
		uint32_t value;
	} fields[] = {{LOG_UID, "uid", about->uid},
		      {LOG_PID, "pid", about->pid},
		      {LOG_REQUEST, "request", about->request}};
	int n = 0;

	if (log_state.sink == SINK_JOURNAL || log_state.level < LOG_LEVEL_DEBUG)
		return 0;
	for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
		if (about->fields & fields[i].field)
			n += snprintf(line + n, room - (size_t)n, "%s %u%s", fields[i].name,
				      fields[i].value,
				      about->fields >= 2 * (unsigned)fields[i].field ? ", " : ": ");
	return n;
}

static void write_line(enum log_level level, const struct log_about *about, const char *format,
		       va_list list)
{
	char line[LINE_BYTES];
	int used = print_head(line, level);
	int n;

	used += print_about(line + used, sizeof(line) - (size_t)used, about);
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
	if (log_state.sink == SINK_JOURNAL && send_to_journal(level, about, line + used))
		return;
	line[n++] = '\n';
	/* One write: lines of front and workers on one pipe do not mix. */
	if (write(STDERR_FILENO, line, (size_t)n) < 0)
		return; /* nowhere left to say so */
}

static const struct log_about about_nothing;

void log_write(enum log_level level, const char *format, ...)
{
	va_list list;

	if (level > log_state.level)
		return;
	va_start(list, format);
	write_line(level, &about_nothing, format, list);
	va_end(list);
}

void log_write_about(const struct log_about *about, enum log_level level, const char *format, ...)
{
	va_list list;

	if (level > log_state.level)
		return;
	va_start(list, format);
	write_line(level, about, format, list);
	va_end(list);
}

/* Return: whether a line may be written; counts those that may not. */
static bool admit(struct log_limit *limit, enum log_level level)
{
	uint64_t now = clock_ns();

	if (level > log_state.level)
		return false;
	if (limit->window_ns == 0 || now - limit->window_ns > LOG_LIMIT_SECONDS * NS_PER_S) {
		if (limit->n_suppressed > 0)
			log_write(level, "%u similar lines suppressed", limit->n_suppressed);
		*limit = (struct log_limit){.window_ns = now};
	}
	if (limit->n_lines >= LOG_LIMIT_LINES) {
		limit->n_suppressed++;
		return false;
	}
	limit->n_lines++;
	return true;
}

void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
{
	va_list list;

	if (!admit(limit, level))
		return;
	va_start(list, format);
	write_line(level, &about_nothing, format, list);
	va_end(list);
}

void log_limited_about(struct log_limit *limit, const struct log_about *about, enum log_level level,
		       const char *format, ...)
{
	va_list list;

	if (!admit(limit, level))
		return;
	va_start(list, format);
	write_line(level, about, format, list);
	va_end(list);
}
