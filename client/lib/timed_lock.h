/* SPDX-License-Identifier: MIT */
/* timed_lock.h: a lock under which one thread may do something slow, while others wait with deadlines of their own. */
#ifndef CLIENT_TIMED_LOCK_H
#define CLIENT_TIMED_LOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include <fmha/fmha.h>

struct timed_lock {
	pthread_mutex_t mutex; /* also of what the slow thing makes */
	pthread_cond_t left;
	bool busy;
};

int timed_lock_init(struct timed_lock *lock, struct fmha_error *err);
void timed_lock_deinit(struct timed_lock *lock);

/* Waits while another thread does something slow. Return: 0 with the lock held, or
 * FMHA_ETIMEDOUT without. */
int timed_lock_take(struct timed_lock *lock, int64_t deadline, struct fmha_error *err);
void timed_lock_give(struct timed_lock *lock);

/* With the lock held: its holder does something slow, and others that want it wait; then holds it as before. */
void timed_lock_begin_slow(struct timed_lock *lock);
void timed_lock_end_slow(struct timed_lock *lock);

#endif
