/* SPDX-License-Identifier: MIT */
#include "worker_registry.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <proto/cleanup.h>
#include <proto/error.h>

#define MAX_DOCUMENT (32 << 20)

/* ---- to the front ---- */

struct change {
	struct session *session;
	uint32_t id;
	enum proto_method method;
	uint64_t n_kernels;
};

static void on_changed(void *owner, const union proto_any_result *result, int fd,
		       const struct fmha_error *error)
{
	struct change *change = owner;
	struct session *session = change->session;
	struct connection *connection = &session->connection;
	struct proto_registry_result answer = {.n_kernels = change->n_kernels};

	(void)fd;
	if (result) {
		answer.stored = result->REGISTRY_CHANGE.stored;
		if (change->method == PROTO_REGISTRY_FORGET)
			answer.n_kernels = result->REGISTRY_CHANGE.n_kernels;
	}
	if (!session->hung_up && result)
		connection_answer(connection, change->id, change->method, &answer, -1);
	else if (!session->hung_up)
		connection_answer_error(connection, change->id, error);
	free(change);
	session_offload_ended(session);
}

void changes_send(struct session *session, uint32_t id, enum proto_method method,
		  const struct proto_registry_change_params *params, int fd, uint64_t n_kernels)
{
	struct change *change = malloc(sizeof(*change));
	struct fmha_error err;
	int r;

	if (!change) {
		if (fd >= 0)
			(void)close(fd);
		(void)fmha_error_set(&err, FMHA_ENOMEM, "registry: out of memory");
		connection_answer_error(&session->connection, id, &err);
		return;
	}
	*change = (struct change){
		.session = session, .id = id, .method = method, .n_kernels = n_kernels};
	r = connection_request(&session->worker->control, PROTO_REGISTRY_CHANGE, params, fd,
			       on_changed, change, &err);
	if (r < 0) {
		free(change);
		connection_answer_error(&session->connection, id, &err);
	} else {
		session->n_offloads++;
	}
}

int changes_request(struct session *session, uint32_t id, enum proto_method method,
		    const union proto_any_params *params, struct fmha_error *err)
{
	struct registry *registry = session->worker->plans.registry;
	struct proto_registry_change_params change = {.uid = session->uid};
	struct kernel_spec spec;
	int r = 0;

	switch (method) {
	case PROTO_REGISTRY_SET_PRIORITY:
		change.change = PROTO_CHANGE_PRIORITY;
		change.priority = params->REGISTRY_SET_PRIORITY.priority;
		r = registry_find(registry, params->REGISTRY_SET_PRIORITY.kernel, &spec, NULL, err);
		if (r == 0)
			(void)spec_name_format(registry_catalog(registry), &spec, change.name);
		break;
	case PROTO_REGISTRY_LIFT:
		change.change = PROTO_CHANGE_LIFT;
		memcpy(change.name, params->REGISTRY_LIFT.kernel, sizeof(change.name));
		if (registry_find(registry, params->REGISTRY_LIFT.kernel, &spec, NULL, NULL) == 0)
			(void)spec_name_format(registry_catalog(registry), &spec, change.name);
		break;
	default:
		change.change = PROTO_CHANGE_FORGET;
		memcpy(change.name, params->REGISTRY_FORGET.kernel, sizeof(change.name));
		memcpy(change.shape, params->REGISTRY_FORGET.shape, sizeof(change.shape));
		if (!*change.name)
			change.name[0] = '*';
	}
	if (r == 0)
		changes_send(session, id, method, &change, -1, 1);
	return r;
}

/* ---- from the front ---- */

int kernels_restore(struct worker *worker, int fd, struct fmha_error *err)
{
	_cleanup_(freep) char *text = NULL;
	size_t size = 0;
	int r;

	if (!worker->plans.registry)
		return 0;
	r = memfd_read(fd, MAX_DOCUMENT, &text, &size, err);
	if (r == 0)
		r = registry_restore(worker->plans.registry, text, size, err);
	kernels_mark_quarantine(worker);
	census_unsettle(&worker->plans.census);
	return r;
}

/* ---- what is used ---- */

#define SHAPES_A_PIECE 12
_Static_assert(SHAPES_A_PIECE *(PLAN_SHAPE_BYTES + PLAN_KERNEL_BYTES + 320) < PIECE_BYTES,
	       "they fit");

/*
 * {"shapes": [{"uid", "shape", "runs", "device_ns", "of_roof", "kernel", "n_splits", "general", "settled"}],
 * "evicted"}, in the making.
 */
struct census_reading {
	struct pieces pieces;
	bool all, begun, comma;
	uint32_t n, next;
	struct {
		const struct census_entry *entry;
		uint32_t generation;
	} shapes[CENSUS_SHAPES];
};

static void begin_reading(struct census_reading *reading)
{
	struct session *session = reading->pieces.session;
	const struct census_entry *entries[CENSUS_SHAPES];

	reading->begun = true;
	reading->n = census_list(&session->worker->plans.census, session->uid, reading->all,
				 entries);
	for (uint32_t i = 0; i < reading->n; i++) {
		reading->shapes[i].entry = entries[i];
		reading->shapes[i].generation = entries[i]->generation;
	}
	pieces_put(&reading->pieces, "{\"shapes\":[");
}

/* Words and names of kernels need no escapes. */
static void put_shape(struct census_reading *reading, const struct census_entry *entry)
{
	struct pieces *to = &reading->pieces;

	pieces_put(to, "%s{\"uid\":%u,\"shape\":\"%s\",\"runs\":%" PRIu64 ",\"device_ns\":%" PRIu64,
		   reading->comma ? "," : "", entry->uid, entry->shape, entry->n_runs, entry->ns);
	if (entry->roof_ns > 0 && entry->timed_ns > 0)
		pieces_put(to, ",\"of_roof\":%.9g", entry->roof_ns / (double)entry->timed_ns);
	pieces_put(to, ",\"kernel\":\"%s\",\"n_splits\":%d,\"general\":%s,\"settled\":%s}",
		   entry->kernel, entry->n_splits, entry->is_general ? "true" : "false",
		   entry->settled ? "true" : "false");
	reading->comma = true;
}

static bool write_some(struct pieces *pieces)
{
	struct census_reading *reading = container_of(pieces, struct census_reading, pieces);

	if (!reading->begun) {
		begin_reading(reading);
		return true;
	}
	for (int i = 0; i < SHAPES_A_PIECE && reading->next < reading->n; i++) {
		uint32_t at = reading->next++;
		const struct census_entry *entry = reading->shapes[at].entry;

		/* Else another one has its place meanwhile, perhaps another user's. */
		if (entry->n_runs > 0 && entry->generation == reading->shapes[at].generation)
			put_shape(reading, entry);
	}
	if (reading->next < reading->n)
		return true;
	pieces_put(pieces, "]");
	if (reading->all)
		pieces_put(pieces, ",\"evicted\":%" PRIu64,
			   pieces->session->worker->plans.census.n_evicted);
	pieces_put(pieces, "}");
	return false;
}

static void free_reading(struct pieces *pieces)
{
	free(container_of(pieces, struct census_reading, pieces));
}

static const struct pieces_ops reading_ops = {PROTO_CENSUS, write_some, free_reading};

int kernels_census(struct session *session, uint32_t id, struct fmha_error *err)
{
	struct census_reading *reading = calloc(1, sizeof(*reading));

	if (!reading)
		return fmha_error_set(err, FMHA_ENOMEM, "census: out of memory");
	reading->all = config_is_privileged(&session->worker->page->config, session->uid);
	pieces_start(&reading->pieces, &reading_ops, session, id);
	return 0;
}
