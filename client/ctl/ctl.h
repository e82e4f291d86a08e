/* SPDX-License-Identifier: MIT */
/*
 * ctl.h: what fmhactl's commands share.
 *
 * A command is a usage with its table of options and one function, in a file of its own, listed in
 * main.c's table. The function gets its own argv (argv[0] is "fmhactl <command>"), reads its options
 * with cli_next(), prints results on stdout, everything else on stderr, and returns one of the exit
 * codes below; after CTL_USAGE main() points to `--help`.
 */
#ifndef CTL_CTL_H
#define CTL_CTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cli/options.h>
#include <fmha/fmha.h>
#include <proto/cleanup.h>

enum ctl_exit {
	CTL_OK = 0,
	CTL_FAILED = 1,      /* a check failed: a result beyond the bar, an invalid spec */
	CTL_USAGE = 2,       /* unknown option, missing argument, a value out of range */
	CTL_UNREACHABLE = 3, /* no daemon, or it went away */
	CTL_REFUSED = 4,     /* the daemon answered with an error */
	CTL_IO = 5,          /* a file cannot be read, written or understood */
	CTL_LATE = 6,        /* no answer within --timeout; the daemon may be well */
};

struct ctl_command {
	struct cli_usage usage; /* its name is "fmhactl <command>" */
	int (*run)(int argc, char **argv);
};

extern const struct ctl_command ctl_archs; /* enumerate.c and its neighbours: libfmha_specs */
extern const struct ctl_command ctl_build;
extern const struct ctl_command ctl_enumerate;
extern const struct ctl_command ctl_profiles;
extern const struct ctl_command ctl_validate;
extern const struct ctl_command ctl_doctor;  /* doctor.c */
extern const struct ctl_command ctl_metrics; /* metrics.c, top.c */
extern const struct ctl_command ctl_top;
extern const struct ctl_command ctl_trace;   /* trace.c */
extern const struct ctl_command ctl_census;  /* census.c */
extern const struct ctl_command ctl_pool;    /* pool.c */
extern const struct ctl_command ctl_devices; /* ping.c, status.c: the daemon's */
extern const struct ctl_command ctl_ping;
extern const struct ctl_command ctl_status;
extern const struct ctl_command ctl_bench;
extern const struct ctl_command ctl_mask; /* mask.c: no daemon */
extern const struct ctl_command ctl_plan;
extern const struct ctl_command ctl_registry;
extern const struct ctl_command ctl_tune;
extern const struct ctl_command ctl_run;
extern const struct ctl_command ctl_verify;
extern const struct ctl_command ctl_warm;

/*
 * Takes a leading operand, such as run's "forward", out of what cli_next() is going to see; "" when
 * there is none.
 */
const char *ctl_take_verb(int *argc, char ***argv);

/* "fmhactl: <message>" on stderr. Return: CTL_USAGE, so that a bad option is one line. */
int ctl_usage_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Prints @err and returns the exit code that fits its code. */
int ctl_error(const struct fmha_error *err);

/* Whole-string numbers inside [min, max]. Return: 0, or CTL_USAGE with a line naming @option. */
int ctl_parse_int(const char *option, const char *text, int64_t min, int64_t max,
		  int64_t *ret_value);
int ctl_parse_int32(const char *option, const char *text, int32_t min, int32_t max,
		    int32_t *ret_value);
int ctl_parse_double(const char *option, const char *text, double *ret_value);

/* One of @words, which a word without text ends. Return: 0, or CTL_USAGE with a line that lists
 * them. */
struct ctl_word {
	const char *text;
	uint32_t value;
};
int ctl_parse_word(const char *option, const char *text, const struct ctl_word *words,
		   uint32_t *ret_value);

/* Where a command's daemon and device are: the options that every such command takes. */
struct ctl_target {
	const char *socket;
	uint32_t timeout_ms;
	uint32_t device;
	bool json; /* of those that have ctl_json_option */
};

/* The options of every command that talks to a daemon, and what cli_next() returns for them. */
enum ctl_target_option { CTL_OPT_SOCKET = 1000, CTL_OPT_TIMEOUT, CTL_OPT_DEVICE, CTL_OPT_JSON };
extern const struct cli_option ctl_target_options[];
/* {--json}: for commands whose answer can be JSON; so that it is called the same everywhere. */
extern const struct cli_option ctl_json_option[];

#define CTL_TARGET_INIT                                                                            \
	{                                                                                          \
		.device = FMHA_ANY_DEVICE                                                          \
	}

/* @option: what cli_next() returned. Return: 0, or CTL_USAGE (a line is printed). */
int ctl_target_option(struct ctl_target *target, int option, const char *value);

/*
 * Reads all options, after which no operand may be left. What the tables keep is kept in @owner.
 * @take: of the other options that are not the target's; NULL: there are none
 * Return: 0 or an exit code.
 */
typedef int (*ctl_take)(void *owner, int option, const char *value);
int ctl_options(const struct ctl_command *command, int argc, char **argv, struct ctl_target *target,
		ctl_take take, void *owner);
/* The same; operands may be left, from argv[optind] on. */
int ctl_options_before(const struct ctl_command *command, int argc, char **argv,
		       struct ctl_target *target, ctl_take take, void *owner);

/* "fmhactl: PATH: why", of errno. Return: CTL_IO. */
int ctl_file_error(const char *path);
/* What @print writes, all at once: a reader sees the whole old file or the whole new one. Return: 0 or an exit code. */
int ctl_replace_file(const char *path, void (*print)(FILE *out, const void *what),
		     const void *what);
/* A whole document. @ret_text: given, without a NUL. Return: 0 or an exit code. */
int ctl_read_file(const char *path, char **ret_text, size_t *ret_n);

/* Prints @json (taken) as one line. Return: CTL_OK or CTL_IO. */
struct cJSON;
int ctl_print_json(struct cJSON *json);
/* The document in @path, given; NULL: a line on stderr says why. */
struct cJSON *ctl_read_json(const char *path);

/* Connect, and open the device; errors are printed. Return: 0 or an exit code. */
int ctl_connect(const struct ctl_target *target, struct fmha_client **ret_client);
/* The daemon's status document. @ret_json: given: free(). */
int ctl_ask_status(const struct ctl_target *target, char **ret_json);
int ctl_open(const struct ctl_target *target, struct fmha_client **ret_client,
	     struct fmha_device **ret_device);
/* For _cleanup_. */
void ctl_client_freep(struct fmha_client **client);
void ctl_device_freep(struct fmha_device **device);

/*
 * One line on stderr, redrawn, for work that takes longer than a second; nothing unless stderr is a
 * terminal. Zero-initialise but for title; call ctl_progress_end() before printing anything else.
 */
struct ctl_progress {
	const char *title;
	int64_t started_ns, drawn_ns;
	bool visible, shows_time_left;
};
void ctl_progress(struct ctl_progress *progress, uint64_t done, uint64_t total);
void ctl_progress_end(struct ctl_progress *progress);

int64_t ctl_now_ns(void);

#endif
