/* SPDX-License-Identifier: MIT */
/*
 * compile.h: one kernel from source to code object, through a helper process.
 *
 * Compilers are large, old ones abort on an arch they do not know, and some inputs keep them busy
 * for ever. So each build runs in a short-lived child, fmhad-compile, with limits on time, memory
 * and file size and a clean environment; whatever happens to it is an error of that build only.
 *
 * Three compilers: "nvrtc" (NVIDIA), "hiprtc" (AMD, in process of the helper) and "clang" (AMD, an
 * external clang or amdclang++ that the helper runs). Libraries are opened at run time.
 */
#ifndef FMHAD_COMPILE_COMPILE_H
#define FMHAD_COMPILE_COMPILE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <compile/cache.h>
#include <compile/config.h>
#include <fmha/base.h>
#include <proto/build.h>

/*
 * Versions that helpers have reported, so that a build which the cache answers starts no process.
 * Trusted for a minute: a compiler may be upgraded under a running daemon. Any thread.
 */
struct compile_versions {
	pthread_mutex_t asking; /* held while a helper is asked: the others wait for its answer */
	pthread_mutex_t lock;
	struct compile_known_version {
		char compiler[16], version[96];
		int64_t asked_ms; /* of CLOCK_MONOTONIC */
	} known[4];
};

struct compile_request {
	struct kernel_build build;
	const char *compiler; /* NULL: compile_default(arch); kept until the build is done */
	uint32_t uid;         /* who asks: the entry's room in the cache is charged to them */
};

/* A request as this machine would build it. */
struct compile_target {
	struct cache_key key;
	char version[96]; /* of the compiler */
};

#define COMPILE_BUSY 1 /* positive: another process builds this very key */

enum compile_patience {
	COMPILE_PATIENT,   /* comes back another time when the key is locked */
	COMPILE_IMPATIENT, /* builds without the lock: twice is better than never */
};

/* "nvrtc" for sm_*, "clang" for gfx*, NULL for an arch that is not compiled for. */
const char *compile_default(const char *arch);

/*
 * Name and version of a compiler, as the helper reports it, with the options that every build by
 * it gets: "nvrtc 13.0", "clang 19.1.7 -mcode-object-version=5 ...".
 * Return: 0, FMHA_ENOTSUP (not installed), FMHA_EIO, FMHA_ETIMEDOUT.
 */
int compile_version(const struct compile_config *config, const char *compiler, char ret_version[96],
		    struct fmha_error *err);

/* Return: 0, FMHA_ENOTSUP with a sentence: what @version names makes wrong code for @arch. */
int compile_check_fit(const char *version, const char *arch, struct fmha_error *err);

/*
 * Everything that decides the code object's bytes: compiler and version, arch, options, and every
 * file of the source folder and abi.h by name and content.
 */
int compile_key(const struct compile_config *config, const struct compile_request *request,
		const char *version, struct cache_key *ret_key, struct fmha_error *err);

/*
 * Runs the helper and waits for it. Blocks for as long as the deadline: call it from a thread that
 * nobody waits for.
 * Return: 0 and an entry (given); FMHA_ENOTSUP (no such compiler), FMHA_EINVAL (the compiler
 * refused the source: the message names the kernel and ends with the first error of the log, the
 * entry with the whole log is given all the same), FMHA_EIO (the helper crashed), FMHA_ETIMEDOUT.
 */
int compile_run(const struct compile_config *config, const struct compile_request *request,
		const char *version, struct cache_entry **ret_entry, struct fmha_error *err);

/* Version and key. Return: 0, or as compile_version(), compile_check_fit() and compile_key(). */
int compile_identify(const struct compile_config *config, const struct compile_request *request,
		     struct compile_target *ret_target, struct fmha_error *err);

/*
 * Takes the key's lock, looks into the cache again, builds, stores. Without a usable cache the
 * result is delivered all the same.
 * @ret_entry: given; also set when the compiler refused the source, see compile_run()
 * @ret_hit:   true when nothing was built; set unless COMPILE_BUSY is returned
 * Return: 0, COMPILE_BUSY, or as compile_run().
 */
int compile_build(const struct compile_config *config, struct cache *cache,
		  const struct compile_request *request, const struct compile_target *target,
		  enum compile_patience patience, struct cache_entry **ret_entry, bool *ret_hit,
		  struct fmha_error *err);

#endif
