/* SPDX-License-Identifier: MIT */
/*
 * times.h: measured times. The row is struct proto_measured, wherever it is on its way; here are the table
 * that keeps rows, the one rule of which row replaces which, and the row as JSON. The front has a table of
 * each model (tune/database.h), and a worker's registry one of what the front told it.
 *
 * One thread at a time.
 */
#ifndef FMHAD_TIMES_H
#define FMHAD_TIMES_H

#include <stdbool.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <proto/messages.h>

#define TIMES_MOST  16384 /* rows of a table: the oldest is dropped for another one */
#define TIMES_SLOTS 1024

enum times_source {
	TIMES_SYSTEM, /* a file that came with a package: never in the place of this machine's own */
	TIMES_IMPORTED, /* from elsewhere, or read again: it has to be newer */
	TIMES_OWN,      /* measured here: the last one counts, unless what is known is newer */
	TIMES_TWIN, /* of an older name of the kernel: the least of those counts, until there is another */
};

/* A row in a table. */
struct times_row {
	struct times_row *next; /* of the same slot: shapes share it by their hash */
	uint64_t hash;          /* of all that tells it from others */
	uint32_t *n_of_kernel;
	const char *shape;
	int32_t n_splits;
	bool own;  /* not the system's */
	bool twin; /* TIMES_TWIN */
	double us;
	uint64_t when_s;
	char kernel[]; /* and then the shape */
};

/* All zero: empty. */
struct times {
	struct times_row *slots[TIMES_SLOTS];
	uint32_t n;
};

void times_clear(struct times *times);

/*
 * Takes a copy of @row, unless what is known of the same kernel, shape and splits stays.
 * @n_of_kernel: counts the rows of its kernel, of which it is one, as long as the table lives; may be NULL
 *
 * Return: 0; 1: what is known stays; FMHA_EINVAL naming the field; FMHA_ENOMEM.
 */
int times_add(struct times *times, const struct proto_measured *row, enum times_source source,
	      uint32_t *n_of_kernel, struct fmha_error *err);

/* Microseconds; 0: there is no such row. */
double times_us(const struct times *times, const char *kernel, const char *shape, int32_t n_splits);

/* Every row, or (@shape not NULL) every one at a shape. @visit: returns non-zero to end, and that is
 * returned. */
typedef int (*times_visit)(void *owner, const struct times_row *row);
int times_each(const struct times *times, const char *shape, times_visit visit, void *owner);

/* Forgets times of kernels that match @pattern (fnmatch), at @shape or (empty) everywhere. Return: how many there were. */
uint64_t times_forget(struct times *times, const char *pattern, const char *shape);

/* ---- as JSON: {"kernel": "...", "shape": "...", "splits": 0, "us": 1.5, "when": 1700000000} ---- */

/* Adds the row to @list, with its kernel's name if it is @named. In a document between json_begin() and
 * json_end(). */
void times_write(cJSON *list, const struct times_row *row, bool named);
/* Adds the member "results" to @root. */
void times_write_all(cJSON *root, const struct times *times, bool own_only);

/*
 * Reads a list of rows: all are judged before the first is given to @take, which returns a negative number to end.
 * @kernel: of all of them; NULL: each has its own
 * @take: NULL: only judge
 *
 * Return: 0; FMHA_EINVAL naming the field; what @take returned.
 */
typedef int (*times_take)(void *owner, const struct proto_measured *row, struct fmha_error *err);
int times_read(const cJSON *list, const char *kernel, times_take take, void *owner,
	       struct fmha_error *err);

#endif
