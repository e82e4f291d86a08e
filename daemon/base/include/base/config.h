/* SPDX-License-Identifier: MIT */
/*
 * config.h: the configuration, as plain data without pointers: the front hands it to its workers as
 * bytes. Read from one JSON file; every key has a default, an unknown key is an error.
 */
#ifndef FMHAD_BASE_CONFIG_H
#define FMHAD_BASE_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <proto/messages.h>

#include <base/limits.h>

#define CONFIG_DEFAULT_PATH   "/etc/fmhad/fmhad.json"
#define CONFIG_MAX_BYTES      (1 << 20)
#define CONFIG_PATH_BYTES     108 /* as sun_path */
#define CONFIG_MAX_ADMINS     16
#define CONFIG_MAX_PRIORITIES 64
#define CONFIG_MODE_UNSET     UINT32_MAX /* until config_resolve() */

#define PCI_BYTES 16

struct config_device {
	char backend[16];            /* cpu, fake, hip, cuda */
	char name[PROTO_NAME_BYTES]; /* for people; default: the backend's */
	char cpu_level[32];    /* cpu, fake: the best level to use; empty: the machine's best */
	uint32_t index;        /* hip, cuda: the runtime's number of the device */
	char pci[PCI_BYTES];   /* hip, cuda: its address, "0000:1b:00.0"; empty: as index says */
	uint32_t threads;      /* cpu, fake: 0: every core that this process may use */
	uint32_t allow_faults; /* fake: method inject is allowed */
	uint32_t stall_ms;     /* no task of a launch ends for so long: the device hangs */
	uint32_t queue_depth;  /* launches of one connection that the device has at a time */
	/* These count as all that it can do, 10^9 a second; 0: what the device says. */
	uint32_t roof_gbs, roof_gflops_f32, roof_gflops_f16, roof_gflops_fp8;
};

#define CONFIG_FILE_BYTES    256
#define CONFIG_FOLDERS_BYTES 2048 /* between colons: those of a virtual environment are many */

/* How the front compiles kernels for GPUs; empty strings: where they are installed. */
struct config_compile {
	char cache[CONFIG_FILE_BYTES];   /* directory; default /var/cache/fmhad, or below $HOME */
	char layer[CONFIG_FILE_BYTES];   /* read-only cache below it, a directory or a pack */
	char sources[CONFIG_FILE_BYTES]; /* folder of the kernel sources */
	char helper[CONFIG_FILE_BYTES];  /* fmhad-compile */
	char clang[CONFIG_FILE_BYTES];   /* command; default: the first found */
	char linker[CONFIG_FILE_BYTES];  /* command; default: clang links itself */
	char library_path[CONFIG_FOLDERS_BYTES]; /* LD_LIBRARY_PATH of the helper */
	uint32_t jobs; /* builds at a time; from 2 on, the last one is for another user than the
			  others; 0: half of the cores, and that one */
	uint32_t deadline_ms; /* of one build */
};

/* Measuring kernels, and what is remembered of it. */
struct config_tuning {
	char state[CONFIG_FILE_BYTES];  /* directory; default: see tune_store_init() */
	char system[CONFIG_FILE_BYTES]; /* read-only database below it; default: the installed */
	uint32_t automatic;             /* measures what clients use, while a device is idle */
	uint32_t idle_s;                /* for so long, before it begins */
	uint32_t share;                 /* percent of the time that is measured then, at most */
	uint32_t launch_ms;             /* what takes longer is not measured by itself */
	uint64_t memory_bytes;          /* of the device, for a problem that is measured */
};

struct config_supervision {
	uint32_t heartbeat_ms;         /* between two questions to a worker that has clients */
	uint32_t heartbeat_timeout_ms; /* a worker that does not answer for so long is killed */
	uint32_t start_timeout_ms;     /* from start to ready */
	uint32_t restart_ms;           /* pause after a failed start; doubles, see supervise.c */
	uint32_t quarantine_deaths;    /* of workers, by one kernel, ... */
	uint32_t quarantine_s;         /* ... within so many seconds, and it is no longer used */
	uint32_t drain_ms;             /* after SIGTERM, for what is in flight */
	uint32_t status_ms;            /* how long status waits for a worker */
};

/* A user's share of a busy device, in proportion to the others' weights. */
struct config_priority {
	uint32_t uid;
	uint32_t weight; /* 1 to 100; of users that are not named: 1 */
};

struct config {
	char socket[CONFIG_PATH_BYTES];         /* empty: $XDG_RUNTIME_DIR/fmhad.sock or
					   /run/fmhad/fmhad.sock */
	uint32_t socket_mode;                   /* by default 0660 with a socket_group, else 0600 */
	char socket_group[32];                  /* empty: the process's own */
	char metrics_socket[CONFIG_PATH_BYTES]; /* empty: metrics are not served */
	char pool_spill[CONFIG_FILE_BYTES];     /* empty: pools have no files */
	uint32_t log_level;                     /* enum log_level */
	uint32_t loop_times;                    /* doing.measures */
	uint32_t n_admins;
	uint32_t admin_uids[CONFIG_MAX_ADMINS]; /* besides root and the daemon's own uid */
	uint32_t n_priorities;
	struct config_priority priorities[CONFIG_MAX_PRIORITIES];
	struct config_supervision supervision;
	struct config_compile compile;
	struct config_tuning tuning;
	uint32_t n_devices; /* 0: the CPU and every GPU that the drivers show */
	struct config_device devices[PROTO_MAX_DEVICES];
	uint64_t limits[N_LIMITS];
};

/* Where a configuration is read from. */
struct config_source {
	const char *path; /* NULL: the default one, which may be absent */
	const char *
		socket; /* instead of the file's; shorter than CONFIG_PATH_BYTES; NULL: the file's */
	bool verbose;   /* log_level is debug, whatever the file says */
};

/* All of it: defaults, file, what the source says itself, the machine. Return: 0, FMHA_EIO or
 * FMHA_EINVAL. */
int config_read(const struct config_source *source, struct config *config, struct fmha_error *err);

void config_init(struct config *config);

/*
 * Reads @path over the defaults in @config. A missing file is an error unless @optional.
 * Return: 0, FMHA_EIO or FMHA_EINVAL; the field is the key's path, the sentence names the file.
 */
int config_load(const char *path, bool optional, struct config *config, struct fmha_error *err);

/* The same for text in memory; @name stands for the file in messages. */
int config_parse(const char *name, const char *text, size_t n, struct config *config,
		 struct fmha_error *err);

/* Replaces the defaults that depend on the machine and the environment. Return: 0 or FMHA_EINVAL.
 */
int config_resolve(struct config *config, struct fmha_error *err);

/*
 * Takes over into @running what of @next, both resolved, a running daemon can take over.
 * @restart: gets the names of other keys that differ, cut off at @n bytes; "" when there is none
 * Return: how many keys were taken over
 */
uint32_t config_reload(struct config *running, const struct config *next, char *restart, size_t n);

/* Writes every key with its meaning, unit, range and default as a part of fmhad.json(5). */
void config_document(FILE *out);

/* The weight of user @uid: see struct config_priority. */
uint32_t config_weight(const struct config *config, uint32_t uid);

/* Whether the user is root, the daemon's own or an administrator. */
bool config_is_privileged(const struct config *config, uint32_t uid);

#endif
