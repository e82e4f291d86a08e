/* SPDX-License-Identifier: MIT */
/*
 * handout.h: memory files that went to clients as answers. They are charged to their user, memory
 * and descriptor, until nobody else has them: a client could keep what it has been given for as
 * long as it likes, also after it has hung up. The kernel tells: it grants a write lease on a file
 * only while nobody else has it open or mapped. It does not count the open file description that
 * memfd_create() makes, so that the client gets another one.
 */
#ifndef FMHAD_BASE_HANDOUT_H
#define FMHAD_BASE_HANDOUT_H

#include <stdbool.h>

#include <uv.h>

#include <base/account.h>

struct handouts {
	uv_timer_t timer; /* runs while there are any */
	struct list list;
};

void handouts_init(struct handouts *handouts, uv_loop_t *loop);

/* A sealed memfd with @data, given; -1: failed. It is charged to nobody. */
int handout_file(const void *data, size_t n);

/*
 * What another process handed over in @fd (borrowed), which may change meanwhile and so is read once: given,
 * with a NUL behind it.
 * Return: 0; FMHA_EINVAL: no file or memfd, or of more than @most bytes; FMHA_EIO, FMHA_ENOMEM.
 */
int handout_read(int fd, size_t most, char **ret_text, size_t *ret_size, struct fmha_error *err);

/*
 * A sealed memfd with @text, given as @ret_fd.
 * Return: 0, FMHA_EQUOTA, FMHA_ENOMEM.
 */
int handout_text(struct handouts *handouts, struct account *account, const char *text, size_t n,
		 int *ret_fd, struct fmha_error *err);

/* Another descriptor of a file that handout_text() has given, with a position of its own; given.
 * -1: none is left. It is not charged: it goes to the same user. */
int handout_again(int fd);

/*
 * Charges what a file of @bytes costs its user, memory and a descriptor, before it is made. What the
 * user's clients have let go of meanwhile makes room for it.
 * Return: 0; FMHA_EQUOTA: nothing is charged.
 */
int handout_charge(struct handouts *handouts, struct account *account, uint64_t bytes,
		   struct fmha_error *err);
void handout_release(struct account *account, uint64_t bytes);

/* More bytes of a file in the making. Return: 0; FMHA_EQUOTA: nothing is charged. */
int handout_charge_more(struct handouts *handouts, struct account *account, uint64_t bytes,
			struct fmha_error *err);

/* Makes a memory file one that nobody can change. */
bool handout_seal(int fd);
/* Whether it is one, and has so many bytes: a mapping of them stays as it is, whoever has the file. */
bool handout_is_sealed(int fd, uint64_t bytes);

/*
 * What of @fd, a memfd that is borrowed, may go to a client: @ret_fd, given. handout_charge() has
 * been called for @bytes, which are given back when nobody else has it; on failure the charge stays
 * the caller's.
 * Return: 0, FMHA_ENOMEM.
 */
int handout_keep(struct handouts *handouts, struct account *account, int fd, uint64_t bytes,
		 int *ret_fd, struct fmha_error *err);

#endif
