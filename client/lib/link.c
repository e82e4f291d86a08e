/* SPDX-License-Identifier: MIT */
/* link.c: a connection that is opened again when it was lost (internal.h). */
#include "internal.h"

int link_init(struct link *link, link_open open, void *owner, int lost_code, struct fmha_error *err)
{
	*link = (struct link){.open = open, .owner = owner, .lost_code = lost_code};
	return gate_init(&link->gate, err);
}

void link_deinit(struct link *link)
{
	link->connection = connection_unref(link->connection);
	gate_deinit(&link->gate);
}

int link_get(struct link *link, int64_t deadline, struct connection **ret_connection,
	     uint64_t *ret_generation, struct fmha_error *err)
{
	int r = gate_lock(&link->gate, deadline, err);

	if (r < 0)
		return r;
	if (!link->connection || connection_is_dead(link->connection)) {
		struct connection *fresh;

		link->connection = connection_unref(link->connection);
		gate_enter(&link->gate);
		r = link->open(link->owner, deadline, &fresh, err);
		gate_leave(&link->gate);
		if (r == 0) {
			link->connection = fresh;
			link->generation++;
		}
	}
	if (r >= 0) {
		*ret_connection = connection_ref(link->connection);
		*ret_generation = link->generation;
	}
	gate_unlock(&link->gate);
	return r;
}

struct connection *link_get_if(struct link *link, uint64_t generation)
{
	struct connection *c = NULL;

	if (gate_lock(&link->gate, deadline_after_ms(RELEASE_TIMEOUT_MS), NULL) < 0)
		return NULL;
	if (link->connection && link->generation == generation &&
	    !connection_is_dead(link->connection))
		c = connection_ref(link->connection);
	gate_unlock(&link->gate);
	return c;
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
