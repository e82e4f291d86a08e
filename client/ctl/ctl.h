/* SPDX-License-Identifier: MIT */
/*
 * ctl.h: what fmhactl's commands share.
 *
 * A command is one function in a file of its own, listed in main.c's table. It gets its own argv
 * (argv[0] is "fmhactl <command>", so getopt_long() works as in main()), prints results on stdout,
 * everything else on stderr, and returns one of the exit codes below. `--help` prints the command's
 * usage text on stdout and returns CTL_OK; after CTL_USAGE main() points to it.
 */
#ifndef CTL_CTL_H
#define CTL_CTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <fmha/fmha.h>

enum ctl_exit {
	CTL_OK = 0,
	CTL_FAILED = 1,      /* a check failed: a result beyond the bar, an invalid spec */
	CTL_USAGE = 2,       /* unknown option, missing argument, a value out of range */
	CTL_UNREACHABLE = 3, /* no daemon, or it went away */
	CTL_REFUSED = 4,     /* the daemon answered with an error */
	CTL_IO = 5,          /* a file cannot be read, written or understood */
};

struct ctl_command {
	const char *name;
	const char *help; /* one line for `fmhactl help` */
	int (*run)(int argc, char **argv);
};

int ctl_archs(int argc, char **argv); /* enumerate.c and its neighbours: libfmha_specs */
int ctl_build(int argc, char **argv); /* build.c */
int ctl_enumerate(int argc, char **argv);
int ctl_profiles(int argc, char **argv);
int ctl_validate(int argc, char **argv);
int ctl_devices(int argc, char **argv); /* ping.c, status.c */
int ctl_ping(int argc, char **argv);
int ctl_status(int argc, char **argv);
int ctl_plan(int argc, char **argv);     /* plan.c */
int ctl_registry(int argc, char **argv); /* registry.c */
int ctl_run(int argc, char **argv);      /* run.c */
int ctl_verify(int argc, char **argv);   /* verify.c */

/* "fmhactl: <message>" on stderr. Return: CTL_USAGE, so that a bad option is one line. */
int ctl_usage_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Prints @err and returns the exit code that fits its code. */
int ctl_error(const struct fmha_error *err);

/* Whole-string numbers inside [min, max]. Return: 0, or CTL_USAGE with a line naming @option. */
int ctl_parse_int(const char *option, const char *text, int64_t min, int64_t max,
		  int64_t *ret_value);
int ctl_parse_double(const char *option, const char *text, double *ret_value);

/* Where a command's daemon and device are: the options that every such command takes. */
struct ctl_target {
	const char *socket;
	uint32_t timeout_ms;
	uint32_t device;
};

/* For getopt_long(): the long options, and what their values do to a target. */
enum ctl_target_option { CTL_OPT_SOCKET = 1000, CTL_OPT_TIMEOUT, CTL_OPT_DEVICE, CTL_OPT_HELP };
#define CTL_TARGET_OPTIONS                                                                         \
	{"socket", required_argument, NULL, CTL_OPT_SOCKET},                                       \
		{"timeout", required_argument, NULL, CTL_OPT_TIMEOUT},                             \
		{"device", required_argument, NULL, CTL_OPT_DEVICE},                               \
	{                                                                                          \
		"help", no_argument, NULL, CTL_OPT_HELP                                            \
	}
#define CTL_TARGET_HELP                                                                            \
	"  --socket PATH    the daemon's socket (default: see `fmhactl help`)\n"                   \
	"  --device N       index of the device (default: the first that is ready)\n"              \
	"  --timeout SECS   give up after this long (default 30)\n"                                \
	"  --help           this text\n"

#define CTL_TARGET_INIT                                                                            \
	{                                                                                          \
		.device = FMHA_ANY_DEVICE                                                          \
	}

/* @option: what getopt_long() returned. Return: 0, or CTL_USAGE (a line is printed). */
int ctl_target_option(struct ctl_target *target, int option, const char *value);

/* Connect, and open the device; errors are printed. Return: 0 or an exit code. */
int ctl_connect(const struct ctl_target *target, struct fmha_client **ret_client);
int ctl_open(const struct ctl_target *target, struct fmha_client **ret_client,
	     struct fmha_device **ret_device);

/*
 * One line on stderr, redrawn, for work that takes longer than a second; nothing unless stderr is a
 * terminal. Zero-initialise but for title; call ctl_progress_end() before printing anything else.
 */
struct ctl_progress {
	const char *title;
	int64_t started_ns, drawn_ns;
	bool visible;
};
void ctl_progress(struct ctl_progress *progress, uint64_t done, uint64_t total);
void ctl_progress_end(struct ctl_progress *progress);

int64_t ctl_now_ns(void);

#endif
