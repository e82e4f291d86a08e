/* SPDX-License-Identifier: MIT */
#include "internal.h"

int turnstile_init(struct turnstile *turnstile, struct fmha_error *err)
{
	pthread_condattr_t attr;
	int r;

	turnstile->busy = false;
	if (pthread_mutex_init(&turnstile->lock, NULL) != 0)
		return fmha_error_set(err, FMHA_ENOMEM, "mutex: out of memory");
	r = pthread_condattr_init(&attr);
	if (r == 0) {
		r = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
		if (r == 0)
			r = pthread_cond_init(&turnstile->left, &attr);
		(void)pthread_condattr_destroy(&attr);
	}
	if (r != 0) {
		(void)pthread_mutex_destroy(&turnstile->lock);
		return fmha_error_set(err, FMHA_ENOMEM, "condition: out of memory");
	}
	return 0;
}

void turnstile_deinit(struct turnstile *turnstile)
{
	(void)pthread_cond_destroy(&turnstile->left);
	(void)pthread_mutex_destroy(&turnstile->lock);
}

int turnstile_lock(struct turnstile *turnstile, int64_t deadline, struct fmha_error *err)
{
	const struct timespec until = deadline_timespec(deadline);

	(void)pthread_mutex_lock(&turnstile->lock);
	while (turnstile->busy) {
		if (deadline_left_ns(deadline) == 0) {
			(void)pthread_mutex_unlock(&turnstile->lock);
			return fmha_error_set(err, FMHA_ETIMEDOUT,
					      "another thread was still connecting or registering");
		}
		(void)pthread_cond_timedwait(&turnstile->left, &turnstile->lock, &until);
	}
	return 0;
}

void turnstile_unlock(struct turnstile *turnstile)
{
	(void)pthread_mutex_unlock(&turnstile->lock);
}

void turnstile_enter(struct turnstile *turnstile)
{
	turnstile->busy = true;
	(void)pthread_mutex_unlock(&turnstile->lock);
}

void turnstile_leave(struct turnstile *turnstile)
{
	(void)pthread_mutex_lock(&turnstile->lock);
	turnstile->busy = false;
	(void)pthread_cond_broadcast(&turnstile->left);
}
