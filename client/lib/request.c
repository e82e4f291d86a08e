/* SPDX-License-Identifier: MIT */
/* request.c: runs that are submitted now and waited for later. */
#include "client.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

int fmha_plan_submit(struct fmha_plan *plan, const struct fmha_run_options *options,
		     struct fmha_request **ret_request, struct fmha_error *err)
{
	struct fmha_request *request;
	int r;

	r = client_check(plan && ret_request ? plan->device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	r = check_run_options(options, err);
	if (r < 0)
		return r;
	request = calloc(1, sizeof(*request));
	if (!request)
		return fmha_error_set(err, FMHA_ENOMEM, "request: out of memory");
	r = plan_start(plan, options, run_deadline(plan->device, options), &request->connection,
		       &request->pending, err);
	if (r < 0) {
		free(request);
		return r;
	}
	request->event_fd = request->poll_fd = -1;
	request->device = device_ref(plan->device);
	*ret_request = request;
	return 0;
}

static int add_to_epoll(int epoll_fd, int fd)
{
	struct epoll_event event = {.events = EPOLLIN};

	return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

/*
 * Two things may be news: bytes on the socket, which this request's waiter would read, and an
 * answer that another thread's waiter has read already. One epoll descriptor stands for both.
 */
int fmha_request_fd(struct fmha_request *request, int *ret_fd, struct fmha_error *err)
{
	int r;

	r = client_check(request && ret_fd ? request->device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	if (request->poll_fd < 0) {
		int event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		int poll_fd = epoll_create1(EPOLL_CLOEXEC);

		if (event_fd < 0 || poll_fd < 0 || add_to_epoll(poll_fd, event_fd) < 0 ||
		    add_to_epoll(poll_fd, request->connection->fd) < 0) {
			r = fmha_error_set(err, FMHA_EIO, "eventfd or epoll: %s", strerror(errno));
			if (event_fd >= 0)
				(void)close(event_fd);
			if (poll_fd >= 0)
				(void)close(poll_fd);
			return r;
		}
		request->event_fd = event_fd;
		request->poll_fd = poll_fd;
		connection_set_event(request->connection, request->pending, event_fd);
	}
	*ret_fd = request->poll_fd;
	return 0;
}

int fmha_request_wait(struct fmha_request *request, uint32_t timeout_ms,
		      struct fmha_run_result *ret_result, struct fmha_error *err)
{
	int r;

	r = client_check(request ? request->device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	r = connection_wait(request->connection, request->pending, deadline_after_ms(timeout_ms),
			    err);
	if (r < 0)
		return r;
	return plan_outcome(request->pending, ret_result, err);
}

int fmha_request_cancel(struct fmha_request *request, struct fmha_error *err)
{
	struct proto_cancel_params params;
	int64_t deadline;
	int r;

	r = client_check(request ? request->device->client : NULL, __func__, err);
	if (r < 0)
		return r;
	/* What has ended needs no cancelling, nor a live connection. */
	if (connection_wait(request->connection, request->pending, 0, NULL) == 0)
		return 0;
	params.request = request->pending->id;
	deadline = client_deadline(request->device->client);
	r = connection_call(request->connection, PROTO_CANCEL, &params, -1, deadline, NULL, NULL,
			    err);
	/* The run may have ended while the cancel was under way. */
	return r == FMHA_ENOENT ? 0 : r;
}

struct fmha_request *fmha_request_free(struct fmha_request *request)
{
	if (!request)
		return NULL;
	if (client_in_child(request->device->client)) {
		/* The pending record stays: another thread of the parent may have been at it. */
		connection_drop_in_child(request->connection);
	} else {
		if (connection_wait(request->connection, request->pending, 0, NULL) < 0)
			plan_cancel(request->connection, request->pending->id,
				    deadline_after_ms(RELEASE_TIMEOUT_MS));
		connection_forget(request->connection, request->pending, NULL, NULL);
	}
	if (request->poll_fd >= 0)
		(void)close(request->poll_fd);
	if (request->event_fd >= 0)
		(void)close(request->event_fd);
	(void)connection_unref(request->connection);
	(void)device_unref(request->device);
	free(request);
	return NULL;
}
