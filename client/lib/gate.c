/* SPDX-License-Identifier: MIT */
#include "internal.h"

int gate_init(struct gate *gate, struct fmha_error *err)
{
	pthread_condattr_t attr;
	int r;

	gate->busy = false;
	if (pthread_mutex_init(&gate->lock, NULL) != 0)
		return fmha_error_set(err, FMHA_ENOMEM, "mutex: out of memory");
	r = pthread_condattr_init(&attr);
	if (r == 0) {
		r = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
		if (r == 0)
			r = pthread_cond_init(&gate->left, &attr);
		(void)pthread_condattr_destroy(&attr);
	}
	if (r != 0) {
		(void)pthread_mutex_destroy(&gate->lock);
		return fmha_error_set(err, FMHA_ENOMEM, "condition: out of memory");
	}
	return 0;
}

void gate_deinit(struct gate *gate)
{
	(void)pthread_cond_destroy(&gate->left);
	(void)pthread_mutex_destroy(&gate->lock);
}

int gate_lock(struct gate *gate, int64_t deadline, struct fmha_error *err)
{
	const struct timespec until = deadline_timespec(deadline);

	(void)pthread_mutex_lock(&gate->lock);
	while (gate->busy) {
		if (deadline_left_ns(deadline) == 0) {
			(void)pthread_mutex_unlock(&gate->lock);
			return fmha_error_set(err, FMHA_ETIMEDOUT,
					      "another thread was still connecting or registering");
		}
		(void)pthread_cond_timedwait(&gate->left, &gate->lock, &until);
	}
	return 0;
}

void gate_unlock(struct gate *gate)
{
	(void)pthread_mutex_unlock(&gate->lock);
}

void gate_enter(struct gate *gate)
{
	gate->busy = true;
	(void)pthread_mutex_unlock(&gate->lock);
}

void gate_leave(struct gate *gate)
{
	(void)pthread_mutex_lock(&gate->lock);
	gate->busy = false;
	(void)pthread_cond_broadcast(&gate->left);
}
