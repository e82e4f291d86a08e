/* SPDX-License-Identifier: MIT */
/*
 * store.h: a database's files in the state directory, above a read-only directory of the system's.
 *
 * A file is replaced as a whole (files/files.h). What cannot be understood is left as it is and not
 * written over: somebody may want it.
 *
 * Blocks on the disk: not for an event loop.
 */
#ifndef FMHAD_TUNE_STORE_H
#define FMHAD_TUNE_STORE_H

#include <limits.h>

#include <tune/database.h>

struct tune_store {
	char directory[PATH_MAX]; /* "": nothing is kept */
	char system[PATH_MAX];    /* "": none */
	int fd;                   /* of the directory, locked for life; -1: not yet */
	bool was_anothers;        /* another daemon had it since it was read */
};

/* @state: NULL or "": $STATE_DIRECTORY, else /var/lib/fmhad for root and for the user whose it is,
 * else $XDG_STATE_HOME/fmhad or $HOME/.local/state/fmhad. @system: NULL or "": where packages install it. */
void tune_store_init(struct tune_store *store, const char *state, const char *system);
void tune_store_deinit(struct tune_store *store);

/* The fate of the files. Sentences are empty when there is nothing to say. */
struct tune_store_report {
	bool results_readable, settings_readable; /* false: not to be written over */
	char results[256], settings[256], system[256];
	char unwritable[256]; /* why nothing can be kept, as it looks now; the folder is made */
	size_t n_stale;       /* files of other environments of this model, which stay */
};

/* Takes the state directory if nobody has it, and reads the system's file, then the machine's own over it. What is missing
 * is no fault. */
void tune_store_load(struct tune_store *store, struct tune_database *database,
		     struct tune_store_report *ret_report);

/* Return: 0, FMHA_EIO: nothing has changed on disk; FMHA_EBUSY: another daemon writes there, or did: with
 * @store->was_anothers and a @store->fd it has to be loaded again first. */
int tune_store_write(struct tune_store *store, const char *name, const char *text,
		     struct fmha_error *err);

#endif
