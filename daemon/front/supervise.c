/* SPDX-License-Identifier: MIT */
/*
 * supervise.c: one worker process a device, always.
 *
 * A worker that dies is replaced at once; one that dies while starting, after a pause that doubles.
 * While clients are attached it is asked for a sign of life, and killed when none comes: nothing
 * else tells a worker that hangs in a driver call from one that is busy. Without clients there are
 * no heartbeats, so an idle daemon sleeps. When this process itself stood still, the silence of a
 * worker says nothing. Every death is held against the kernel that was running and the user who had
 * asked for it (quarantine.h).
 */
#include "builder.h"
#include "front.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <base/clock.h>
#include <proto/error.h>

#define LONGEST_PAUSE_MS    10000
#define STARTS_UNTIL_FAILED 3
#define EXIT_GRACE_MS       200 /* from a worker's closing its socket to its end */

/* Why we have killed a worker. */
enum kill_reason {
	KILL_NOT, /* we have not */
	KILL_SILENT,
	KILL_NOT_READY,
	KILL_SOCKET_CLOSED,
	KILL_STOPPING,
};

/* A process and its control socket; a slot's next process may start before these are all closed. */
struct worker_process {
	struct worker_slot *slot; /* NULL: replaced */
	struct front *front;
	uv_process_t process;
	struct connection control;
	struct worker_page *page;
	struct list compiles; /* struct compile_answer: what it waits for */
	uint32_t n_open;      /* handles that hold this struct: process, control */
	bool process_alive;
	enum kill_reason killed;
	bool leaving; /* told to go: it exits by itself */
	bool hung_up; /* its control socket is closed */
};

static void on_timer(uv_timer_t *timer);
static void on_control_message(struct connection *connection, struct proto_message *message);
static void on_control_hangup(struct connection *connection);
static void on_control_closed(struct connection *connection);

static const struct connection_ops control_ops = {.on_message = on_control_message,
						  .on_closed = on_control_closed,
						  .on_hangup = on_control_hangup};

const char *worker_state_name(enum worker_state state)
{
	static const char *const names[] = {[WORKER_STARTING] = "starting",
					    [WORKER_READY] = "ready",
					    [WORKER_RESTARTING] = "restarting",
					    [WORKER_FAILED] = "failed",
					    [WORKER_STOPPED] = "stopped"};

	return names[state];
}

uint32_t worker_slot_pid(const struct worker_slot *slot)
{
	return slot->process ? (uint32_t)slot->process->process.pid : 0;
}

bool worker_slot_has_failed(const struct worker_slot *slot)
{
	return slot->n_failed_starts >= STARTS_UNTIL_FAILED;
}

static void set_state(struct worker_slot *slot, enum worker_state state)
{
	slot->state = state;
	snprintf(slot->device.state, sizeof(slot->device.state), "%s", worker_state_name(state));
	front_announce(slot->front);
}

/* ---- clients that wait for the device ---- */

static void open_request_free(struct open_request *open)
{
	list_remove(&open->in_slot);
	list_remove(&open->in_client);
	if (open->fd >= 0)
		(void)close(open->fd);
	if (open->account) {
		account_release(open->account, ACCOUNT_DESCRIPTORS, 1);
		(void)account_put(open->account);
	} else if (open->control_id) {
		connection_release_fds(&open->client->connection, 1);
	}
	free(open);
}

void open_request_forget(struct open_request *open)
{
	struct account *account = open->client->account;

	/* There is room: the connection has just given back as much. */
	if (!open->control_id || account_charge(account, ACCOUNT_DESCRIPTORS, 1, NULL) < 0) {
		open_request_free(open);
		return;
	}
	open->account = account;
	account->n_references++;
	open->client = NULL;
	list_remove(&open->in_client);
	if (open->fd >= 0)
		(void)close(open->fd);
	open->fd = -1;
}

static void refuse_open(struct open_request *open, int code, const char *reason)
{
	struct fmha_error err;

	fmha_error_set_field(&err, code, "device", "device %u: %.200s", open->slot->index, reason);
	if (open->client)
		connection_answer_error(&open->client->connection, open->id, &err);
	open_request_free(open);
}

static void refuse_all(struct worker_slot *slot, int code, const char *reason)
{
	while (!list_is_empty(&slot->opens))
		refuse_open(container_of(slot->opens.next, struct open_request, in_slot), code,
			    reason);
}

static uint32_t new_control_id(struct front *front)
{
	if (++front->next_control_id == 0)
		front->next_control_id = 1;
	return front->next_control_id;
}

static void start_timer(struct worker_slot *slot, uint64_t after_ms)
{
	slot->timer_due_ns = clock_ns() + after_ms * NS_PER_MS;
	uv_timer_start(&slot->timer, on_timer, after_ms, 0);
}

static void start_heartbeats(struct worker_slot *slot)
{
	uint32_t interval = slot->front->config.supervision.heartbeat_ms;

	if (slot->beating)
		return;
	slot->beating = true;
	slot->heard_ns = clock_ns();
	start_timer(slot, interval);
}

/* Makes the pair of sockets and sends the worker its end. */
static void attach(struct open_request *open)
{
	struct worker_slot *slot = open->slot;
	const struct client *client = open->client;
	struct proto_worker_attach_params params = {.session = ++slot->front->next_session,
						    .uid = client->uid,
						    .gid = client->gid,
						    .pid = client->pid};
	struct fmha_error err;
	int pair[2];

	if (connection_hold_fds(&open->client->connection, 1, &err) < 0) {
		refuse_open(open, err.code, err.msg);
		return;
	}
	open->control_id = new_control_id(slot->front);
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0) {
		refuse_open(open, FMHA_EBUSY, "no file descriptors left");
		return;
	}
	/* The client gets an ordinary blocking socket. */
	(void)fcntl(pair[0], F_SETFL, O_RDWR);
	memcpy(params.client, client->name, sizeof(params.client));
	open->fd = pair[0];
	if (connection_request(&slot->process->control, open->control_id, PROTO_WORKER_ATTACH,
			       &params, pair[1], &err) < 0)
		refuse_open(open, FMHA_EDEVICE, err.msg);
	else
		start_heartbeats(slot);
}

static void attach_all(struct worker_slot *slot)
{
	list_for_each(node, &slot->opens) attach(container_of(node, struct open_request, in_slot));
}

void worker_slot_open(struct worker_slot *slot, struct client *client, uint32_t id)
{
	struct open_request *open;
	struct fmha_error err;

	if (slot->state == WORKER_FAILED || slot->state == WORKER_STOPPED) {
		fmha_error_set_field(&err, slot->state == WORKER_FAILED ? FMHA_EDEVICE : FMHA_EBUSY,
				     "device", "device %u is %s: %.180s", slot->index,
				     worker_state_name(slot->state), slot->reason);
		connection_answer_error(&client->connection, id, &err);
		return;
	}
	open = calloc(1, sizeof(*open));
	if (!open) {
		fmha_error_set(&err, FMHA_ENOMEM, "open_device: out of memory");
		connection_answer_error(&client->connection, id, &err);
		return;
	}
	open->slot = slot;
	open->client = client;
	open->id = id;
	open->fd = -1;
	list_append(&slot->opens, &open->in_slot);
	list_append(&client->opens, &open->in_client);
	if (slot->state == WORKER_READY)
		attach(open);
}

/* Return: false when it is no answer to an open_device. */
static bool finish_open(struct worker_slot *slot, const struct proto_message *message)
{
	list_for_each(node, &slot->opens)
	{
		struct open_request *open = container_of(node, struct open_request, in_slot);
		struct proto_open_device_result result = {.device = slot->device,
							  .worker_pid = worker_slot_pid(slot)};
		int fd = open->fd;

		if (open->control_id != message->id)
			continue;
		if (!open->client) {
			/* Its end is closed: the worker's session ends by itself. */
		} else if (message->error.code != FMHA_OK) {
			connection_answer_error(&open->client->connection, open->id,
						&message->error);
		} else {
			open->fd = -1;
			connection_answer(&open->client->connection, open->id, PROTO_OPEN_DEVICE,
					  &result, fd);
		}
		open_request_free(open);
		return true;
	}
	return false;
}

/* ---- the control socket ---- */

static void on_ready(struct worker_slot *slot, const struct proto_message *message)
{
	struct proto_worker_ready_params params;
	struct fmha_error err;

	if (proto_decode_params(message, &params, &err) < 0) {
		connection_fail(&slot->process->control, &err);
		return;
	}
	slot->device = params.device;
	slot->device.device = slot->index;
	slot->n_failed_starts = 0;
	uv_timer_stop(&slot->timer);
	slot->beating = false;
	log_info("device %u: %s (%s, %s) is ready, worker %d", slot->index, slot->device.name,
		 slot->device.backend, slot->device.arch, slot->process->process.pid);
	connection_answer(&slot->process->control, message->id, PROTO_WORKER_READY,
			  &(struct proto_empty){0}, -1);
	set_state(slot, WORKER_READY);
	attach_all(slot);
}

static void on_status_answer(struct worker_slot *slot, const struct proto_message *message)
{
	struct proto_json_result result = {0};
	int fd = connection_take_fd(&slot->process->control); /* -1: it could not be received */

	if (message->error.code != FMHA_OK ||
	    proto_decode_result(message, PROTO_WORKER_STATUS, &result, NULL) < 0)
		result.size = 0;
	status_on_answer(slot, message->id, result.size ? fd : -1, result.size);
	if (fd >= 0)
		(void)close(fd);
}

/* Of an answer that nobody waits for any more: whether a descriptor comes with it. */
static bool is_status(const struct proto_message *message)
{
	struct proto_json_result result;

	return message->error.code == FMHA_OK &&
	       proto_decode_result(message, PROTO_WORKER_STATUS, &result, NULL) == 0;
}

static void on_drained(struct worker_slot *slot)
{
	slot->drained = true;
	front_on_drained(slot->front);
}

/* ---- kernels that a worker wants compiled ---- */

/* Answered on the control socket of the process that asked, if it still lives. */
struct compile_answer {
	struct list in_process;
	struct worker_process *process;
	struct builder_request *request;
	uint32_t id;
};

static void compile_answer_free(struct compile_answer *answer)
{
	list_remove(&answer->in_process);
	free(answer);
}

static void on_compiled(void *owner, const struct proto_compile_result *result, int fd,
			const struct fmha_error *error)
{
	struct compile_answer *answer = owner;
	struct connection *control = &answer->process->control;
	uint32_t id = answer->id;

	compile_answer_free(answer); /* first: a hangup while answering frees those that are left */
	if (error->code == FMHA_OK)
		connection_answer(control, id, PROTO_COMPILE, result, fd);
	else
		connection_answer_error(control, id, error);
}

static void on_compile(struct worker_process *process, const struct proto_message *message)
{
	struct compile_answer *answer = malloc(sizeof(*answer));
	struct proto_compile_params params;
	struct fmha_error err;
	int r;

	if (!answer) {
		fmha_error_set(&err, FMHA_ENOMEM, "compile: out of memory");
		connection_answer_error(&process->control, message->id, &err);
		return;
	}
	answer->process = process;
	answer->id = message->id;
	list_append(&process->compiles, &answer->in_process);
	r = proto_decode_params(message, &params, &err);
	if (r == 0)
		r = builder_submit(process->front->builder, &params, on_compiled, answer,
				   &answer->request, &err);
	if (r < 0) {
		compile_answer_free(answer);
		connection_answer_error(&process->control, message->id, &err);
	}
}

static struct compile_answer *find_compile(struct worker_process *process, uint32_t id)
{
	list_for_each(node, &process->compiles)
	{
		struct compile_answer *answer = container_of(node, struct compile_answer,
							     in_process);

		if (answer->id == id)
			return answer;
	}
	return NULL;
}

static void on_compile_cancel(struct worker_process *process, const struct proto_message *message)
{
	struct proto_compile_cancel_params params;
	struct compile_answer *answer;
	struct fmha_error err;

	if (proto_decode_params(message, &params, &err) < 0) {
		connection_answer_error(&process->control, message->id, &err);
		return;
	}
	answer = find_compile(process, params.request);
	if (answer) { /* else it has been answered meanwhile */
		builder_forget(answer->request);
		compile_answer_free(answer);
		fmha_error_set(&err, FMHA_ECANCELED, "compile: cancelled");
		connection_answer_error(&process->control, params.request, &err);
	}
	connection_answer(&process->control, message->id, PROTO_COMPILE_CANCEL,
			  &(struct proto_empty){0}, -1);
}

static void forget_compiles(struct worker_process *process)
{
	/* The last one first: the queue would begin with the next when the first one is gone. */
	while (!list_is_empty(&process->compiles)) {
		struct compile_answer *answer = container_of(process->compiles.prev,
							     struct compile_answer, in_process);

		builder_forget(answer->request);
		compile_answer_free(answer);
	}
}

/* ---- messages ---- */

static void on_control_message(struct connection *connection, struct proto_message *message)
{
	struct worker_process *process = container_of(connection, struct worker_process, control);
	struct worker_slot *slot = process->slot;

	if (!slot)
		return;
	slot->heard_ns = clock_ns();
	if (message->type == PROTO_REQUEST && message->method == PROTO_WORKER_READY) {
		on_ready(slot, message);
	} else if (message->type == PROTO_REQUEST && message->method == PROTO_COMPILE) {
		on_compile(process, message);
	} else if (message->type == PROTO_REQUEST && message->method == PROTO_COMPILE_CANCEL) {
		on_compile_cancel(process, message);
	} else if (message->type == PROTO_ANSWER) {
		/* Ids are unique over all methods. What nobody asked for is a heartbeat's, or a
		 * status that comes too late; only status comes with a descriptor, and one that is
		 * there may belong to the next message. */
		if (status_awaits(slot, message->id))
			on_status_answer(slot, message);
		else if (slot->drain_id && message->id == slot->drain_id)
			on_drained(slot);
		else if (!finish_open(slot, message) && is_status(message))
			on_status_answer(slot, message);
	}
}

static void kill_process(struct worker_process *process, enum kill_reason reason)
{
	if (!process || !process->process_alive)
		return;
	process->killed = reason;
	uv_process_kill(&process->process, SIGKILL);
}

static void on_control_hangup(struct connection *connection)
{
	struct worker_process *process = container_of(connection, struct worker_process, control);

	forget_compiles(process);
	process->hung_up = true;
	/* Usually the process is dead already and its exit is reported next. */
	if (!process->leaving && process->slot)
		start_timer(process->slot, EXIT_GRACE_MS);
}

static void release_process(struct worker_process *process)
{
	if (--process->n_open > 0)
		return;
	munmap(process->page, sizeof(*process->page));
	free(process);
}

static void on_control_closed(struct connection *connection)
{
	release_process(container_of(connection, struct worker_process, control));
}

static void on_process_closed(uv_handle_t *handle)
{
	release_process(container_of((uv_process_t *)handle, struct worker_process, process));
}

uint32_t worker_slot_request(struct worker_slot *slot, enum proto_method method)
{
	uint32_t id = new_control_id(slot->front);
	struct fmha_error err;

	if (slot->state != WORKER_READY ||
	    connection_request(&slot->process->control, id, method, &(struct proto_empty){0}, -1,
			       &err) < 0)
		return 0;
	return id;
}

/* ---- deaths ---- */

static void describe_death(struct worker_process *process, int64_t status, int signal, char *reason,
			   size_t n)
{
	static const char *const killed[] = {
		[KILL_SILENT] = "the worker did not answer and was killed",
		[KILL_NOT_READY] = "the worker was not ready in time and was killed",
		[KILL_SOCKET_CLOSED] = "the worker closed its socket, lived on and was killed",
		[KILL_STOPPING] = "the worker did not end in time and was killed"};
	const struct worker_page *page = process->page;

	if (page->reason[0])
		snprintf(reason, n, "%.200s", page->reason);
	else if (process->killed != KILL_NOT)
		snprintf(reason, n, "%s", killed[process->killed]);
	else if (signal)
		snprintf(reason, n, "the worker was ended by signal %d (%s)", signal,
			 strsignal(signal));
	else
		snprintf(reason, n, "the worker exited with status %d", (int)status);
}

static void schedule_start(struct worker_slot *slot, bool was_ready)
{
	uint64_t pause = slot->front->config.supervision.restart_ms;

	if (was_ready) {
		set_state(slot, WORKER_RESTARTING);
		worker_slot_start(slot);
		return;
	}
	slot->n_failed_starts++;
	for (uint32_t i = 1; i < slot->n_failed_starts && pause < LONGEST_PAUSE_MS; i++)
		pause *= 2;
	if (pause > LONGEST_PAUSE_MS)
		pause = LONGEST_PAUSE_MS;
	set_state(slot, worker_slot_has_failed(slot) ? WORKER_FAILED : WORKER_RESTARTING);
	if (slot->state == WORKER_FAILED)
		refuse_all(slot, FMHA_EDEVICE, slot->reason);
	start_timer(slot, pause);
}

/* Which kernel, if any, ended the process, and whose request that was. */
static struct worker_death find_culprit(struct worker_process *process)
{
	const struct front *front = process->front;
	struct worker_page *page = process->page;
	bool on_loop = process->killed == KILL_SILENT && atomic_load(&page->loop_busy);
	struct worker_death death = {
		.device = process->slot->index, .kernel = "", .uid = WORKER_NO_USER};

	page->culprit[sizeof(page->culprit) - 1] = '\0';
	page->loop_kernel[sizeof(page->loop_kernel) - 1] = '\0';
	page->reason[sizeof(page->reason) - 1] = '\0';
	if (page->culprit[0]) {
		death.kernel = page->culprit;
		death.uid = page->culprit_uid;
		death.problem = page->culprit_problem;
	} else if (on_loop) {
		death.kernel = page->loop_kernel;
		death.uid = page->loop_uid;
		death.problem = page->loop_problem;
	}
	death.trusted = death.uid == WORKER_NO_USER || client_is_privileged(front, death.uid);
	return death;
}

static void on_process_exit(uv_process_t *handle, int64_t status, int signal)
{
	struct worker_process *process = container_of(handle, struct worker_process, process);
	struct worker_slot *slot = process->slot;
	struct worker_death death;
	bool was_ready;

	process->process_alive = false;
	process->leaving = true;
	connection_close(&process->control);
	uv_close((uv_handle_t *)handle, on_process_closed);
	if (!slot)
		return;
	death = find_culprit(process);
	process->slot = NULL;
	slot->process = NULL;
	slot->beating = false;
	uv_timer_stop(&slot->timer);
	was_ready = slot->state == WORKER_READY;
	status_on_worker_gone(slot);
	list_for_each(node, &slot->opens)
	{
		struct open_request *open = container_of(node, struct open_request, in_slot);

		if (open->control_id) /* it was being attached */
			refuse_open(open, FMHA_EDEVICE, "the worker died");
	}
	if (slot->front->draining || slot->state == WORKER_STOPPED) {
		set_state(slot, WORKER_STOPPED);
		refuse_all(slot, FMHA_EBUSY, "the daemon is stopping");
		on_drained(slot);
		return;
	}
	slot->n_deaths++;
	quarantine_add(&slot->front->quarantine, &death, clock_ns());
	describe_death(process, status, signal, slot->reason, sizeof(slot->reason));
	log_warning("device %u: %s", slot->index, slot->reason);
	schedule_start(slot, was_ready);
}

/* ---- starting ---- */

static struct worker_page *make_page(struct worker_slot *slot, int *ret_fd)
{
	int fd = memfd_create("fmhad worker page", MFD_CLOEXEC);
	struct worker_page *page;

	if (fd < 0)
		return NULL;
	if (ftruncate(fd, sizeof(*page)) < 0)
		goto fail;
	page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		goto fail;
	page->magic = WORKER_PAGE_MAGIC;
	page->bytes = sizeof(*page);
	page->device = slot->index;
	page->config = slot->front->config;
	page->culprit_uid = page->loop_uid = WORKER_NO_USER;
	page->n_quarantined = quarantine_list(&slot->front->quarantine, slot->index, clock_ns(),
					      page->quarantined);
	*ret_fd = fd;
	return page;
fail:
	(void)close(fd);
	return NULL;
}

/* The worker talks to us only: the service manager's variables are none of its business. */
static char **worker_environment(void)
{
	static const char *const dropped[] = {
		"NOTIFY_SOCKET=", "WATCHDOG_USEC=", "WATCHDOG_PID=", "LISTEN_"};
	size_t n = 0, kept = 0;
	char **environment;

	while (environ[n])
		n++;
	environment = malloc((n + 1) * sizeof(*environment));
	if (!environment)
		return NULL;
	for (size_t i = 0; i < n; i++) {
		bool drop = false;

		for (size_t j = 0; j < sizeof(dropped) / sizeof(dropped[0]); j++)
			drop |= strncmp(environ[i], dropped[j], strlen(dropped[j])) == 0;
		if (!drop)
			environment[kept++] = environ[i];
	}
	environment[kept] = NULL;
	return environment;
}

static int spawn(struct worker_process *process, int control_fd, int page_fd)
{
	char title[32];
	char *arguments[] = {title, "--worker", NULL};
	uv_stdio_container_t stdio[5] = {
		{.flags = UV_IGNORE},
		{.flags = UV_IGNORE},
		{.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO},
		{.flags = UV_INHERIT_FD, .data.fd = control_fd},
		{.flags = UV_INHERIT_FD, .data.fd = page_fd},
	};
	uv_process_options_t options = {.exit_cb = on_process_exit,
					/* Also right when the file was replaced meanwhile. */
					.file = "/proc/self/exe",
					.args = arguments,
					.stdio_count = 5,
					.stdio = stdio,
					.env = worker_environment()};
	int r;

	if (!options.env)
		return UV_ENOMEM;
	snprintf(title, sizeof(title), "fmhad-worker-%u", process->slot->index);
	r = uv_spawn(&process->front->loop, &process->process, &options);
	free(options.env);
	return r;
}

/* Return: 0 or a negative FMHA_E* code. */
static int start_process(struct worker_slot *slot, struct fmha_error *err)
{
	struct worker_process *process = calloc(1, sizeof(*process));
	int pair[2] = {-1, -1}, page_fd = -1, r;

	if (!process)
		return fmha_error_set(err, FMHA_ENOMEM, "worker: out of memory");
	process->slot = slot;
	process->front = slot->front;
	list_init(&process->compiles);
	process->page = make_page(slot, &page_fd);
	if (!process->page ||
	    socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0) {
		fmha_error_set(err, FMHA_EIO, "worker: %s", strerror(errno));
		goto fail;
	}
	r = spawn(process, pair[1], page_fd);
	if (r < 0) {
		fmha_error_set(err, FMHA_EIO, "worker: %s", uv_strerror(r));
		uv_close((uv_handle_t *)&process->process, on_process_closed);
		process->n_open = 1;
		process->slot = NULL;
		(void)close(pair[0]);
		(void)close(pair[1]);
		(void)close(page_fd);
		return FMHA_EIO;
	}
	(void)close(pair[1]);
	(void)close(page_fd);
	process->process_alive = true;
	process->n_open = 2;
	slot->process = process;
	if (connection_open(&process->control, &slot->front->hub, pair[0], NULL, false,
			    &control_ops, err) < 0) {
		process->n_open = 1;
		kill_process(process, KILL_SOCKET_CLOSED);
		return FMHA_EIO;
	}
	return 0;
fail:
	if (process->page)
		munmap(process->page, sizeof(*process->page));
	if (page_fd >= 0)
		(void)close(page_fd);
	free(process);
	return FMHA_EIO;
}

void worker_slot_start(struct worker_slot *slot)
{
	struct fmha_error err;

	slot->n_starts++;
	if (start_process(slot, &err) < 0) {
		snprintf(slot->reason, sizeof(slot->reason), "%s", err.msg);
		log_error("device %u: %s", slot->index, err.msg);
		if (!slot->process)
			schedule_start(slot, false);
		return;
	}
	set_state(slot, WORKER_STARTING);
	start_timer(slot, slot->front->config.supervision.start_timeout_ms);
}

/* The timer has come so late that this process must have stood still (SIGSTOP, a suspended machine,
 * no core): what others have sent meanwhile has not been read. */
static bool has_stood_still(const struct worker_slot *slot)
{
	uint64_t timeout = slot->front->config.supervision.heartbeat_timeout_ms * NS_PER_MS;

	return clock_ns() - slot->timer_due_ns > timeout / 2;
}

static void beat(struct worker_slot *slot)
{
	uint32_t interval = slot->front->config.supervision.heartbeat_ms;
	uint64_t timeout = slot->front->config.supervision.heartbeat_timeout_ms * NS_PER_MS;

	if (has_stood_still(slot))
		slot->heard_ns = clock_ns();
	start_timer(slot, interval);
	if (clock_ns() - slot->heard_ns > timeout) {
		log_error("device %u: worker %u does not answer", slot->index,
			  worker_slot_pid(slot));
		kill_process(slot->process, KILL_SILENT);
	} else if (atomic_load(&slot->process->page->n_sessions) == 0 &&
		   list_is_empty(&slot->opens)) {
		slot->beating = false;
		uv_timer_stop(&slot->timer);
	} else {
		worker_slot_request(slot, PROTO_PING);
	}
}

static void on_timer(uv_timer_t *timer)
{
	struct worker_slot *slot = container_of(timer, struct worker_slot, timer);

	if (slot->process && slot->process->hung_up) {
		kill_process(slot->process, KILL_SOCKET_CLOSED);
		return;
	}
	switch (slot->state) {
	case WORKER_STARTING:
		if (has_stood_still(slot)) {
			start_timer(slot, slot->front->config.supervision.start_timeout_ms);
			break;
		}
		log_error("device %u: worker %u is not ready in time", slot->index,
			  worker_slot_pid(slot));
		kill_process(slot->process, KILL_NOT_READY);
		break;
	case WORKER_READY:
		beat(slot);
		break;
	case WORKER_RESTARTING:
	case WORKER_FAILED:
		worker_slot_start(slot);
		break;
	case WORKER_STOPPED:
		break;
	}
}

void worker_slot_init(struct front *front, uint32_t index)
{
	struct worker_slot *slot = &front->slots[index];
	const struct config_device *config = &front->config.devices[index];

	slot->front = front;
	slot->index = index;
	list_init(&slot->opens);
	uv_timer_init(&front->loop, &slot->timer);
	slot->device.device = index;
	/* Until the worker describes it. */
	memcpy(slot->device.backend, config->backend, sizeof(config->backend));
	if (config->name[0])
		memcpy(slot->device.name, config->name, sizeof(config->name));
	else
		memcpy(slot->device.name, config->backend, sizeof(config->backend));
}

/* ---- the end ---- */

void worker_slot_drain(struct worker_slot *slot)
{
	slot->drain_id = worker_slot_request(slot, PROTO_WORKER_DRAIN);
	if (slot->drain_id)
		return;
	worker_slot_stop(slot, true); /* it is not ready: nothing is in flight */
	slot->drained = worker_slot_is_over(slot);
}

void worker_slot_stop(struct worker_slot *slot, bool now)
{
	bool was_over = worker_slot_is_over(slot);

	slot->state = WORKER_STOPPED;
	uv_timer_stop(&slot->timer);
	if (was_over)
		return;
	/* Without its control socket the worker answers what is pending and exits. */
	slot->process->leaving = true;
	if (now)
		kill_process(slot->process, KILL_STOPPING);
	else
		connection_close(&slot->process->control);
}

bool worker_slot_is_over(const struct worker_slot *slot)
{
	return !slot->process;
}
