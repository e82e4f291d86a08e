/* SPDX-License-Identifier: MIT */
/*
 * registry.h: the kernels of one device and what is known about each.
 *
 * Which kernels the device can have is not stored: it follows from the backends' rows, for every arch
 * that the device runs (a CPU runs its level and all below). What is stored is what differs from the
 * default: kernels that were quarantined, measured, run or given a priority.
 *
 * A kernel is one piece of code, and its name says what is compiled in. Names that are older than that
 * say of a problem what is no matter to the code; they are taken for the kernel that runs it.
 *
 * Kernel sets say which of the possible kernels are offered. A set is a JSON list of patterns over
 * canonical names, with * and ?; a leading ! takes away what the patterns before it took in. A new
 * registry has one set, "default", which is ["*"]. A kernel is offered when any loaded set names
 * it; kernels that are named by a set other than "default" are preferred.
 *
 * All functions may be called from any thread. Walks see the state of the moment, lookups by
 * signature that of their start or later.
 */
#ifndef FMHAD_REGISTRY_H
#define FMHAD_REGISTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <fmha/base.h>
#include <specs/backend.h>
#include <times/times.h>

#define REGISTRY_MAX_ARCHS         8
#define REGISTRY_MAX_SETS          16
#define REGISTRY_MAX_PATTERNS      1024      /* of a set */
#define REGISTRY_MAX_KERNELS       (1 << 20) /* with a state of their own */
#define REGISTRY_ENVIRONMENT_BYTES 160
#define REGISTRY_NAME_BYTES        64           /* of devices and sets, NUL included */
#define REGISTRY_MAX_SET           (1u << 20)   /* bytes of a set's JSON */
#define REGISTRY_MAX_JSON          (512u << 20) /* bytes of an export that is imported */

struct registry;

/* The state of a kernel; all zero for most. */
struct registry_info {
	bool quarantined; /* it killed workers: never offered */
	int32_t priority; /* the higher the sooner, among candidates nobody measured */
	uint32_t n_tuned;
	uint64_t n_runs, run_ns; /* in this process */
	uint8_t offered;         /* a loaded set names it */
	uint8_t preferred;       /* and not only the default set */
};

/*
 * Kernels that are not this build's: whoever plans with them offline says where they come from. The daemon has
 * none. @arch: a number of the registry's.
 */
struct registry_source {
	/* Return: as spec_own_each(), FMHA_ENOMEM. */
	int (*each)(const struct registry_source *source, size_t arch, spec_visit visit,
		    void *owner);
	bool (*has)(const struct registry_source *source, size_t arch,
		    const struct kernel_spec *spec);
};

struct registry_device {
	char name[REGISTRY_NAME_BYTES]; /* the model: exports merge between equal ones */
	/* These decide besides the model how fast a kernel is: driver, compiler and sources in one
	 * word. Empty: not known; then no results are merged. */
	char environment[REGISTRY_ENVIRONMENT_BYTES];
	const struct registry_source *source;  /* kept; NULL: what this build can run */
	const char *archs[REGISTRY_MAX_ARCHS]; /* best first; kept only while registry_new() runs */
	size_t n_archs;
};

/* Fills archs: a CPU level runs its own kernels and those of all levels below, a GPU its arch's.
 * @arch: kept. */
void registry_device_archs(struct registry_device *device, const char *arch);

/*
 * @catalog: kept.
 * Return: 0; FMHA_ENOENT when specs/ knows none of the archs; FMHA_ENOMEM, FMHA_EIO, FMHA_EINVAL.
 */
int registry_new(const struct spec_catalog *catalog, const struct registry_device *device,
		 struct registry **ret_registry, struct fmha_error *err);
struct registry *registry_free(struct registry *registry);

const struct spec_catalog *registry_catalog(const struct registry *registry);
size_t registry_n_archs(const struct registry *registry);
const char *registry_arch_name(const struct registry *registry, size_t arch);
/* All specs of all archs. */
uint64_t registry_count(struct registry *registry);

/*
 * By name. @ret_spec, @ret_info: may be NULL.
 * Return: 0; FMHA_ENOENT: no kernel of this device, the message says which part of the name is
 * wrong.
 */
int registry_find(struct registry *registry, const char *name, struct kernel_spec *ret_spec,
		  struct registry_info *ret_info, struct fmha_error *err);
void registry_get_info(struct registry *registry, const struct kernel_spec *spec,
		       struct registry_info *ret_info);

/* Its number in the catalog. */
int registry_arch(const struct registry *registry, size_t arch);
/*
 * This build's kernels that have @dims and all of @traits, in all states. @each: returns other than 0 to end.
 * @ret_why: as spec_candidates() has it.
 * Return: what it did, 0, FMHA_ENOMEM.
 */
typedef int (*registry_candidate)(void *owner, const struct kernel_spec *spec,
				  const struct registry_info *info);
int registry_candidates(struct registry *registry, size_t arch, const struct traits *traits,
			struct spec_head_dims dims, registry_candidate each, void *owner,
			const char **ret_why);

/*
 * By filter (specs/filter.h; "" is everything): calls @visit until it returns non-zero and returns
 * that. Return: also FMHA_EINVAL for a bad filter, with a caret in the message; FMHA_ENOMEM.
 */
typedef int (*registry_visit)(void *owner, const struct kernel_spec *spec, const char *name,
			      const struct registry_info *info);
int registry_each(struct registry *registry, const char *filter, registry_visit visit, void *owner,
		  struct fmha_error *err);

/* The same over the kernels that have a state of their own, in the order of specs: however many the
 * device can have. */
int registry_each_known(struct registry *registry, registry_visit visit, void *owner,
			struct fmha_error *err);

/* State. A name that is no kernel of this device: FMHA_ENOENT. */
int registry_quarantine(struct registry *registry, const char *name, struct fmha_error *err);
/* None is any more. */
void registry_clear_quarantine(struct registry *registry);
int registry_set_priority(struct registry *registry, const char *name, int32_t priority,
			  struct fmha_error *err);
/*
 * Counts a run of @ns (0: not known for this kernel alone).
 * @entry: NULL, or where the caller keeps what a look at the table found (NULL at first): valid as
 *         long as the registry
 */
struct registry_entry;
void registry_add_run(struct registry *registry, const struct kernel_spec *spec, uint64_t ns,
		      struct registry_entry **entry);
/*
 * The one door by which a measured time comes in: its name is resolved, and it is kept under the name
 * that the kernel has here. Of several older names the least time counts.
 * Return: 0, 1: what is known stays (times/times.h); FMHA_EINVAL, FMHA_ENOENT, FMHA_ENOMEM.
 */
int registry_set_tuned(struct registry *registry, const struct proto_measured *row,
		       enum times_source source, struct fmha_error *err);
/* Return: true and the time, or false. */
bool registry_get_tuned(struct registry *registry, const struct kernel_spec *spec,
			const char *shape, int32_t n_splits, double *ret_us);
/* A kernel that was measured at a shape. */
struct registry_measured {
	struct kernel_spec spec;
	int32_t n_splits;
	double us;
};
/* Copies what was measured at @shape, the fastest first. Return: how many, at most @most. */
size_t registry_measured_at(struct registry *registry, const char *shape,
			    struct registry_measured *ret_measured, size_t most);
/* At any shape. */
bool registry_has_measured(struct registry *registry);
/* Grows with every change of results, sets, priorities or quarantine. */
uint64_t registry_generation(struct registry *registry);
/* As a document that the front keeps says: replaces sets, priorities and results by its own; kernels
 * that this build does not know are skipped. See daemon/tune/include/tune/database.h. */
int registry_restore(struct registry *registry, const char *json, size_t size,
		     struct fmha_error *err);

/*
 * Kernel sets. Loading replaces a set of the same name.
 * @json: a JSON list of strings, @size bytes
 * @ret_n_kernels: how many kernels of this device the set names; may be NULL, which is much faster
 *                 for a device with millions
 */
int registry_load_set(struct registry *registry, const char *name, const char *json, size_t size,
		      uint64_t *ret_n_kernels, struct fmha_error *err);
/* @ret_n_kernels: how many kernels are not offered any more; may be NULL. Return: 0, FMHA_ENOENT.
 */
int registry_unload_set(struct registry *registry, const char *name, uint64_t *ret_n_kernels,
			struct fmha_error *err);

/*
 * JSON: device, sets, statistics by family, data type, pipeline and state, and the kernels that
 * @filter lets through, each with its state; without a filter those that something is known about:
 * quarantined, run, tuned or given a priority. @all: also "runs", "run_ns" and
 * "tuned", which tell what users have run. Walks the whole registry: not for an event loop.
 * Return: 0; FMHA_EINVAL: the filter; FMHA_EQUOTA: more than @most_bytes; FMHA_ENOMEM.
 */
int registry_export(struct registry *registry, const char *filter, bool all, uint64_t most_bytes,
		    FILE *file, struct fmha_error *err);

/* One kernel: {"name", "flags", "priority", "offered", "runs", "run_ns", "tuned", "sets": [...]}, where
 * sets are those that name it. Given. Return: 0, FMHA_ENOENT, FMHA_ENOMEM. */
int registry_kernel_text(struct registry *registry, const char *name, bool all, char **ret_text,
			 struct fmha_error *err);
/* {"priorities", "results"}: what registry_restore() takes. Given. Return: 0, FMHA_ENOMEM. */
int registry_state_text(struct registry *registry, char **ret_text, struct fmha_error *err);

/*
 * Merges an export of another machine with the same device and environment: tuned results that this
 * registry does not have or has older ones of, and priorities that it does not have. What only the
 * other machine's files and processes know (quarantined, run) is left out. Kernels
 * that this build does not know are skipped.
 * @ret_n_merged: kernels that gained something
 * Return: 0; FMHA_EINVAL naming the field: not an export, of another device, or with
 * results of another environment; FMHA_ENOMEM.
 */
int registry_import(struct registry *registry, const char *json, size_t size,
		    uint64_t *ret_n_merged, struct fmha_error *err);

#endif
