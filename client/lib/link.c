/* SPDX-License-Identifier: MIT */
/* link.c: a connection that is opened again when it was lost (internal.h). */
#include "internal.h"

int link_init(struct link *link, link_open open, void *owner, int lost_code, struct fmha_error *err)
{
	*link = (struct link){.open = open, .owner = owner, .lost_code = lost_code};
	return turnstile_init(&link->turnstile, err);
}

void link_deinit(struct link *link)
{
	link->connection = connection_unref(link->connection);
	turnstile_deinit(&link->turnstile);
}

int link_get(struct link *link, int64_t deadline, struct connection **ret_connection,
	     uint64_t *ret_generation, struct fmha_error *err)
{
	int r = turnstile_lock(&link->turnstile, deadline, err);

	if (r < 0)
		return r;
	if (!link->connection || connection_is_dead(link->connection)) {
		struct connection *fresh;

		link->connection = connection_unref(link->connection);
		turnstile_enter(&link->turnstile);
		r = link->open(link->owner, deadline, &fresh, err);
		turnstile_leave(&link->turnstile);
		if (r == 0) {
			link->connection = fresh;
			link->generation++;
		}
	}
	if (r >= 0) {
		*ret_connection = connection_ref(link->connection);
		*ret_generation = link->generation;
	}
	turnstile_unlock(&link->turnstile);
	return r;
}

/* @generation: 0: any */
static struct connection *get_live(struct link *link, uint64_t generation, int64_t deadline)
{
	struct connection *c = NULL;

	if (turnstile_lock(&link->turnstile, deadline, NULL) < 0)
		return NULL;
	if (link->connection && (generation == 0 || link->generation == generation) &&
	    !connection_is_dead(link->connection))
		c = connection_ref(link->connection);
	turnstile_unlock(&link->turnstile);
	return c;
}

struct connection *link_get_if(struct link *link, uint64_t generation)
{
	return get_live(link, generation, deadline_after_ms(RELEASE_TIMEOUT_MS));
}

struct connection *link_get_open(struct link *link)
{
	return get_live(link, 0, 0);
}

int link_call(struct link *link, enum proto_method method, const void *params, int fd,
	      int64_t deadline, void *ret_result, int *ret_fd, struct fmha_error *err)
{
	int r = link->lost_code;

	for (int attempt = 0; attempt < 2 && r == link->lost_code; attempt++) {
		struct connection *c;
		uint64_t generation;

		r = link_get(link, deadline, &c, &generation, err);
		if (r < 0)
			return r;
		r = connection_call(c, method, params, fd, deadline, ret_result, ret_fd, err);
		c = connection_unref(c);
	}
	return r;
}
