/* SPDX-License-Identifier: MIT */
/*
 * http.c: as much of HTTP as a collector of metrics speaks: GET /metrics, one request a connection,
 * few connections at a time, each with a deadline. Who may open the socket gets sums of all users and
 * nothing of any.
 */
#include "front.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <metrics/metrics.h>
#include <proto/error.h>

#define MOST_CALLERS  8 /* of tenants and of trusted users each */
#define MOST_OF_ONE   2 /* tenant */
#define REQUEST_BYTES 4096
#define DEADLINE_MS   5000

struct http {
	uv_pipe_t listener;
	struct front *front;
	uint32_t n_callers, n_trusted; /* trusted ones are not among the callers */
	struct list callers;
	uv_pipe_t refused; /* whom there is no memory for */
	bool refusing, refuse_again;
};

struct caller {
	struct http *http;
	struct list in_callers;
	uid_t uid;
	bool counted, trusted;
	uv_pipe_t pipe;
	uv_timer_t timer;
	uv_write_t write;
	int n_open; /* handles: pipe, timer */
	bool asked, closing;
	size_t n;
	char request[REQUEST_BYTES + 1];
	char *answer;
};

static void on_handle_closed(uv_handle_t *handle)
{
	struct caller *caller = handle->data;

	if (--caller->n_open > 0)
		return;
	if (caller->counted && caller->trusted)
		caller->http->n_trusted--;
	else if (caller->counted)
		caller->http->n_callers--;
	list_remove(&caller->in_callers);
	free(caller->answer);
	free(caller);
}

static void caller_close(struct caller *caller)
{
	if (caller->closing)
		return;
	caller->closing = true;
	status_unread(caller->http->front, caller);
	uv_close((uv_handle_t *)&caller->pipe, on_handle_closed);
	uv_close((uv_handle_t *)&caller->timer, on_handle_closed);
}

static void on_deadline(uv_timer_t *timer)
{
	caller_close(timer->data);
}

static void on_written(uv_write_t *write, int status)
{
	(void)status;
	caller_close(write->handle->data);
}

static void respond(struct caller *caller, const char *status, const char *type, const char *body)
{
	uv_buf_t buffer;
	int n = asprintf(&caller->answer,
			 "HTTP/1.0 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
			 "Connection: close\r\n\r\n%s",
			 status, type, strlen(body), body);

	if (n < 0) {
		caller->answer = NULL;
		caller_close(caller);
		return;
	}
	buffer = uv_buf_init(caller->answer, (unsigned int)n);
	if (uv_write(&caller->write, (uv_stream_t *)&caller->pipe, &buffer, 1, on_written) < 0)
		caller_close(caller);
}

/*
 * OpenMetrics for who names it, as Prometheus does, unless with q=0; the classic text, which all
 * collectors read, for the rest. Weights are left alone otherwise: who takes both gets the newer.
 */
static enum metrics_format format_asked(const char *request)
{
	static const char type[] = "application/openmetrics-text";
	const char *line = strstr(request, "\r\n");

	for (; line && strncmp(line, "\r\n\r\n", 4) != 0; line = strstr(line + 2, "\r\n")) {
		const char *end = strstr(line + 2, "\r\n");
		const char *at, *weight;

		if (strncasecmp(line + 2, "accept:", 7) != 0)
			continue;
		at = strcasestr(line, type);
		if (!at || !end || at > end)
			continue;
		at += strlen(type);
		weight = strcasestr(at, "q=");
		if (!weight || weight > at + strcspn(at, ",\r") || strtod(weight + 2, NULL) > 0)
			return METRICS_OPEN;
	}
	return METRICS_CLASSIC;
}

static void on_status(void *owner, const cJSON *status)
{
	struct caller *caller = owner;
	enum metrics_format format = format_asked(caller->request);
	char *text = status ? metrics_text(status, format) : NULL;

	if (text)
		respond(caller, "200 OK", metrics_type(format), text);
	else
		caller_close(caller);
	free(text);
}

/* The request's head is complete. */
static void http_answer(struct caller *caller)
{
	static const char get[] = "GET /metrics";
	const char *request = caller->request;

	caller->asked = true;
	(void)uv_read_stop((uv_stream_t *)&caller->pipe);
	if (strncmp(request, "GET ", 4) != 0)
		respond(caller, "405 Method Not Allowed", "text/plain",
			"GET /metrics is all there is\n");
	else if (strncmp(request, get, sizeof(get) - 1) != 0 ||
		 !strchr(" ?\r\n", request[sizeof(get) - 1]))
		respond(caller, "404 Not Found", "text/plain", "GET /metrics is all there is\n");
	else if (status_read(caller->http->front, on_status, caller) < 0)
		caller_close(caller);
}

static void on_allocate(uv_handle_t *handle, size_t wanted, uv_buf_t *buffer)
{
	struct caller *caller = handle->data;

	(void)wanted;
	*buffer = uv_buf_init(caller->request + caller->n,
			      (unsigned int)(REQUEST_BYTES - caller->n));
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer)
{
	struct caller *caller = stream->data;

	(void)buffer;
	if (n < 0) { /* also UV_ENOBUFS: the head is too long */
		caller_close(caller);
		return;
	}
	caller->n += (size_t)n;
	caller->request[caller->n] = '\0';
	if (!caller->asked &&
	    (strstr(caller->request, "\r\n\r\n") || strstr(caller->request, "\n\n")))
		http_answer(caller);
}

/* Takes a place. Tenants take none from each other beyond a share, nor any from those who watch the
 * service. */
static bool take_place(struct caller *caller)
{
	struct http *http = caller->http;
	struct ucred peer;
	socklen_t size = sizeof(peer);
	uv_os_fd_t fd;
	uint32_t n = 0;

	if (uv_fileno((uv_handle_t *)&caller->pipe, &fd) < 0 ||
	    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0)
		return false;
	caller->uid = peer.uid;
	caller->trusted = config_is_privileged(&http->front->config, peer.uid);
	list_for_each_entry(struct caller, other, &http->callers, in_callers) {
		n += other->counted && other->uid == peer.uid;
	}
	if (caller->trusted ? http->n_trusted >= MOST_CALLERS
			    : n >= MOST_OF_ONE || http->n_callers >= MOST_CALLERS)
		return false;
	caller->counted = true;
	if (caller->trusted)
		http->n_trusted++;
	else
		http->n_callers++;
	return true;
}

static void http_refuse(struct http *http);

static void on_refused(uv_handle_t *handle)
{
	struct http *http = handle->data;

	http->refusing = false;
	if (http->refuse_again)
		http_refuse(http);
}

/* Without memory for a caller. One that is not accepted would be the last: libuv waits with it. */
static void http_refuse(struct http *http)
{
	http->refuse_again = http->refusing;
	if (http->refusing)
		return;
	http->refusing = true;
	uv_pipe_init(&http->front->loop, &http->refused, 0);
	http->refused.data = http;
	(void)uv_accept((uv_stream_t *)&http->listener, (uv_stream_t *)&http->refused);
	uv_close((uv_handle_t *)&http->refused, on_refused);
}

static void on_connect(uv_stream_t *listener, int status)
{
	struct http *http = listener->data;
	struct caller *caller = status < 0 ? NULL : calloc(1, sizeof(*caller));

	if (!caller && status == 0)
		http_refuse(http);
	if (!caller)
		return;
	caller->http = http;
	caller->n_open = 2;
	list_init(&caller->in_callers);
	list_append(&http->callers, &caller->in_callers);
	uv_pipe_init(&http->front->loop, &caller->pipe, 0);
	uv_timer_init(&http->front->loop, &caller->timer);
	caller->pipe.data = caller->timer.data = caller;
	if (uv_accept(listener, (uv_stream_t *)&caller->pipe) < 0 || !take_place(caller) ||
	    uv_read_start((uv_stream_t *)&caller->pipe, on_allocate, on_read) < 0) {
		caller_close(caller);
		return;
	}
	uv_timer_start(&caller->timer, on_deadline, DEADLINE_MS, 0);
}

int http_open(struct front *front, struct fmha_error *err)
{
	const char *path = front->config.metrics_socket;
	struct http *http;
	int fd, r;

	if (!path[0])
		return 0;
	r = listen_at(&front->config, path, &fd, err);
	if (r < 0)
		return r;
	http = calloc(1, sizeof(*http));
	if (!http) {
		(void)close(fd);
		(void)unlink(path);
		return fmha_error_set(err, FMHA_ENOMEM, "metrics_socket: out of memory");
	}
	http->front = front;
	list_init(&http->callers);
	front->http = http;
	uv_pipe_init(&front->loop, &http->listener, 0);
	http->listener.data = http;
	r = uv_pipe_open(&http->listener, fd);
	if (r == 0)
		r = uv_listen((uv_stream_t *)&http->listener, MOST_CALLERS, on_connect);
	return r < 0 ? fmha_error_set_field(err, FMHA_EIO, "metrics_socket", "%s: %s", path,
					    uv_strerror(r))
		     : 0;
}

void http_close(struct front *front)
{
	if (!front->http)
		return;
	(void)unlink(front->config.metrics_socket);
	uv_close((uv_handle_t *)&front->http->listener, NULL);
	/* What callers still point to lives as long as the process, which is about to end. */
	front->http = NULL;
}
