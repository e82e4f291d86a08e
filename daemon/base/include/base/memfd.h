/* SPDX-License-Identifier: MIT */
/*
 * memfd.h: memory files that went to clients as answers. They are charged to their user, memory
 * and descriptor, until nobody else has them: a client could keep what it has been given for as
 * long as it likes, also after it has hung up. The kernel tells: it grants a write lease on a file
 * only while nobody else has it open or mapped. It does not count the open file description that
 * memfd_create() makes, so that the client gets another one.
 */
#ifndef FMHAD_BASE_MEMFD_H
#define FMHAD_BASE_MEMFD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include <base/account.h>
#include <base/list.h>

struct memfds {
	uv_timer_t timer; /* runs while there are any */
	struct list list;
};

void memfds_init(struct memfds *memfds, uv_loop_t *loop);

/* A sealed memfd with @data, given; -1: failed. It is charged to nobody. */
int memfd_file(const void *data, size_t n);

/*
 * What another process handed over in @fd (borrowed), which may change meanwhile and so is read once: given,
 * with a NUL behind it.
 * Return: 0; FMHA_EINVAL: no file or memfd, or of more than @most bytes; FMHA_EIO, FMHA_ENOMEM.
 */
int memfd_read(int fd, size_t most, char **ret_text, size_t *ret_size, struct fmha_error *err);

/*
 * A sealed memfd with @text, given as @ret_fd.
 * Return: 0, FMHA_EQUOTA, FMHA_ENOMEM.
 */
int memfd_text(struct memfds *memfds, struct account *account, const char *text, size_t n,
	       int *ret_fd, struct fmha_error *err);

/* Another descriptor of a file that memfd_text() has given, with a position of its own; given.
 * -1: none is left. It is not charged: it goes to the same user. */
int memfd_again(int fd);

/*
 * Charges what a file of @bytes costs its user, memory and a descriptor, before it is made. What the
 * user's clients have let go of meanwhile makes room for it.
 * Return: 0; FMHA_EQUOTA: nothing is charged.
 */
int memfd_charge(struct memfds *memfds, struct account *account, uint64_t bytes,
		 struct fmha_error *err);
void memfd_release(struct account *account, uint64_t bytes);

/* More bytes of a file in the making. Return: 0; FMHA_EQUOTA: nothing is charged. */
int memfd_charge_more(struct memfds *memfds, struct account *account, uint64_t bytes,
		      struct fmha_error *err);

/* Makes a memory file one that nobody can change. */
bool memfd_seal(int fd);
/* Whether it is one, and has so many bytes: a mapping of them stays as it is, whoever has the file. */
bool memfd_is_sealed(int fd, uint64_t bytes);

/*
 * What of @fd, a memfd that is borrowed, may go to a client: @ret_fd, given. memfd_charge() has
 * been called for @bytes, which are given back when nobody else has it; on failure the charge stays
 * the caller's.
 * Return: 0, FMHA_ENOMEM.
 */
int memfd_keep(struct memfds *memfds, struct account *account, int fd, uint64_t bytes, int *ret_fd,
	       struct fmha_error *err);

/* ---- slabs ---- */

/*
 * Memory for many objects of one size, in pieces of SLAB_BYTES that are given back one by one.
 * What malloc() has lies in one heap, which free() shrinks in one go once its top is free: thousands of
 * plans that end are milliseconds of whoever frees the last one.
 */

#define SLAB_BYTES (256u << 10)

struct slabs {
	size_t bytes;          /* of an object, with what is kept before it */
	struct list with_room; /* struct slab */
	struct slab *spare;    /* an empty one, for the next object; NULL: none */
};

/* @bytes: of an object, less than SLAB_BYTES by some */
void slabs_init(struct slabs *slabs, size_t bytes);

/* All zero; NULL: out of memory. */
void *slabs_take(struct slabs *slabs);
void slabs_give_back(struct slabs *slabs, void *object);

#endif
