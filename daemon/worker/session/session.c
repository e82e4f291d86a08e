/* SPDX-License-Identifier: MIT */
/* session.c: how long a session lives: until its connection is closed, and what it has under way
 * has ended. */
#include <stdlib.h>

#include "run/request.h"
#include "worker.h"

void session_freep(struct session **at)
{
	struct session *session = *at;

	if (!session)
		return;
	checked_forget(session);
	device_stream_free(session->worker->device, session->fetches);
	device_stream_free(session->worker->device, session->stream);
	fair_session_deinit(&session->turn);
	table_deinit(&session->buffers);
	table_deinit(&session->events);
	table_deinit(&session->plans);
	if (session->account) {
		account_release(session->account, ACCOUNT_SESSIONS, 1);
		account_put(session->account);
	}
	free(session);
}

void session_release(struct session *session)
{
	if (session->closed && session->n_running == 0 && session->n_offloads == 0)
		session_freep(&session);
}

void session_offload_ended(struct session *session)
{
	session->n_offloads--;
	session_release(session);
}

void session_offload_late(struct session *session, uint32_t request, const struct fmha_error *err)
{
	if (!session->hung_up)
		connection_answer_error(&session->connection, request, err);
	session_offload_ended(session);
}
