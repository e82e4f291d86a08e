/* SPDX-License-Identifier: MIT */
/* registration.c: objects of ours that a worker knows by an id of its own, and those of the next
 * worker by another one (internal.h). */
#include "internal.h"

int registration_bind(struct registration *registration, registration_tell tell, void *object,
		      struct connection *connection, uint64_t generation, int64_t deadline,
		      uint64_t *ret_worker_id, struct fmha_error *err)
{
	int r = turnstile_lock(&registration->turnstile, deadline, err);

	if (r < 0)
		return r;
	if (registration->generation != generation) {
		uint64_t worker_id = 0;

		turnstile_enter(&registration->turnstile);
		r = tell(object, connection, generation, deadline, &worker_id, err);
		turnstile_leave(&registration->turnstile);
		if (r == 0) {
			registration->worker_id = worker_id;
			registration->generation = generation;
		}
	}
	if (r == 0)
		*ret_worker_id = registration->worker_id;
	turnstile_unlock(&registration->turnstile);
	return r;
}

int registration_begin(struct registration *registration, registration_tell tell, void *object,
		       struct fmha_device *device, int64_t deadline, struct fmha_error *err)
{
	int r = FMHA_EDEVICE;

	for (int attempt = 0; attempt < 2 && r == FMHA_EDEVICE; attempt++) {
		uint64_t generation, worker_id;
		struct connection *c;

		r = link_get(&device->worker, deadline, &c, &generation, err);
		if (r < 0)
			break;
		r = registration_bind(registration, tell, object, c, generation, deadline,
				      &worker_id, err);
		c = connection_unref(c);
	}
	return r;
}

void registration_end(const struct registration *registration, struct fmha_device *device,
		      enum proto_method method, const void *params)
{
	struct connection *c = NULL;

	if (registration->generation != 0 && !client_in_child(device->client))
		c = link_get_if(&device->worker, registration->generation);
	if (!c)
		return;
	/* A failure is the end of the connection, which releases everything. */
	(void)connection_call(c, method, params, -1, deadline_after_ms(RELEASE_TIMEOUT_MS), NULL,
			      NULL, NULL);
	c = connection_unref(c);
}
