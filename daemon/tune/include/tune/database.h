/* SPDX-License-Identifier: MIT */
/*
 * database.h: what is remembered of one device model beyond the life of a process: measured times,
 * kernel sets, priorities, quarantine. The front keeps one for each model that its workers serve;
 * store.h puts it on disk.
 *
 * Measured times hold in the environment in which they were measured: driver, compiler and kernel
 * sources. They have a file for each environment, so that what became stale stays and counts again
 * when that environment comes back. Settings are the administrator's and hold in all of them.
 *
 * One thread at a time.
 */
#ifndef FMHAD_TUNE_DATABASE_H
#define FMHAD_TUNE_DATABASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <times/times.h>

#define TUNE_MAX_PRIORITIES 4096
#define TUNE_MAX_SETS       16
#define TUNE_MAX_BYTES      (8u << 20) /* of a file */
#define TUNE_KERNEL_BYTES   256
#define TUNE_NAME_BYTES     128

/* A kernel that is not used, by nobody or for one user, until then. */
struct tune_quarantined {
	char kernel[TUNE_KERNEL_BYTES];
	uint64_t code; /* which other names have, too; 0: not known */
	bool everybody;
	uint32_t uid;
	int64_t until_s; /* CLOCK_REALTIME */
};

struct tune_database;

/* Compares what times of a device hold for: model and arch, driver, compiler, sources. */
bool tune_is_same(const struct proto_worker_ready_params *a,
		  const struct proto_worker_ready_params *b);

struct tune_database *tune_database_new(const struct proto_worker_ready_params *identity);
struct tune_database *tune_database_free(struct tune_database *database);
/* Names in what is read from now on are of the catalog's kernels: older ones become the kernel's own. @catalog: kept. */
struct spec_catalog;
void tune_database_set_catalog(struct tune_database *database, const struct spec_catalog *catalog);
const struct proto_worker_ready_params *
tune_database_identity(const struct tune_database *database);
/* File names: "nvidia-h200-132-1f2e3d4c.json" and "nvidia-h200-132.settings.json". */
void tune_results_file(const struct proto_worker_ready_params *identity,
		       char name[TUNE_NAME_BYTES]);
void tune_settings_file(const struct proto_worker_ready_params *identity,
			char name[TUNE_NAME_BYTES]);

/* The times that were measured. What is the system's (TIMES_SYSTEM) is never written again. */
struct times *tune_database_times(struct tune_database *database);

/* 0 takes a priority back. Return: 0, FMHA_EQUOTA, FMHA_ENOMEM. */
int tune_database_set_priority(struct tune_database *database, const char *kernel, int32_t priority,
			       struct fmha_error *err);
/* @json: the set's list of patterns, as the registry takes it. Return: 0, FMHA_EINVAL, FMHA_EQUOTA,
 * FMHA_ENOMEM. */
int tune_database_load_set(struct tune_database *database, const char *name, const char *json,
			   size_t size, struct fmha_error *err);
/* Return: 0, FMHA_ENOENT. */
int tune_database_unload_set(struct tune_database *database, const char *name,
			     struct fmha_error *err);
/* Replaces the list, which is copied. */
int tune_database_set_quarantine(struct tune_database *database,
				 const struct tune_quarantined *list, size_t n,
				 struct fmha_error *err);
size_t tune_database_quarantine(const struct tune_database *database,
				const struct tune_quarantined **ret_list);

/*
 * Documents; texts are given and freed with free(), NULL when out of memory. Reading is all or
 * nothing: a file that is cut off, or of another format or version, changes nothing and is
 * FMHA_EINVAL, with the reason.
 *
 *   {"format": "fmhad-tuned", "version": 1, "model": "...", "arch": "...", "driver": "...",
 *    "compiler": "...", "sources": "...", "results": [{"kernel": "...", "shape": "...",
 *    "splits": 0, "us": 1.5, "when": 1700000000}, ...]}
 *   {"format": "fmhad-settings", "version": 1, "model": "...", "sets": {"default": ["*"]},
 *    "priorities": {"fwd-...": 3}, "quarantine": [{"kernel": "...", "uid": 1000, "until": 1}]}
 */
char *tune_database_results_text(const struct tune_database *database);
char *tune_database_settings_text(const struct tune_database *database);
int tune_database_read_results(struct tune_database *database, const char *text, size_t size,
			       bool own, struct fmha_error *err);
int tune_database_read_settings(struct tune_database *database, const char *text, size_t size,
				struct fmha_error *err);
/* A kernel that had several priorities under older names, of which the highest counts; empty: none. */
const char *tune_database_conflict(const struct tune_database *database);
/* Adds "results" of @text, this machine's own from now on. @ret_n: how many were news */
int tune_database_merge(struct tune_database *database, const char *text, size_t size,
			uint64_t *ret_n, struct fmha_error *err);
/* A worker restores this (registry_restore()): both together, without quarantine. To be called between
 * json_begin() and json_end(). */
cJSON *tune_database_worker_json(const struct tune_database *database);

#endif
