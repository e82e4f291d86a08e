/* SPDX-License-Identifier: MIT */
/*
 * status.c: method status. The front asks every ready worker, waits a moment, and answers with what
 * has come in: a worker that hangs costs its own part and nothing else. Whoever asks meanwhile, or
 * too soon after the last time, waits and gets the same answer. Sessions of other users are shown
 * to privileged callers only.
 */
#include "builder.h"
#include "pools.h"
#include "tuned.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/status.h>
#include <json/json.h>
#include <proto/error.h>

#define MAX_JSON_BYTES (8u << 20)

/* Between two rounds of questions: a worker with many clients takes half a millisecond to answer,
 * on everybody's time. */
#define PAUSE_MS 10

#define NO_USER UINT32_MAX

struct status_waiter {
	struct list in_waiters;
	struct client *client; /* NULL: the daemon itself, which has @reader */
	uint32_t id;
	status_reader reader;
	void *owner;
};

struct status_part {
	struct status_gathering *gathering;
	bool asked;     /* the worker has not answered yet */
	cJSON *answer;  /* but for its sessions; NULL: none came */
	char *sessions; /* as text: a line each, after a newline; NULL: none came */
};

struct status_gathering {
	struct front *front;
	uv_timer_t timer;
	bool asking; /* the workers were asked */
	struct list waiters;
	struct status_part parts[PROTO_MAX_DEVICES];
};

static void add_client(cJSON *list, const struct client *client)
{
	cJSON *item = json_add_item(list);

	cJSON_AddNumberToObject(item, "uid", client->uid);
	cJSON_AddNumberToObject(item, "pid", client->pid);
	cJSON_AddStringToObject(item, "client", client->name);
	cJSON_AddNumberToObject(item, "frames", (double)client->connection.n_frames);
	cJSON_AddNumberToObject(item, "in_flight", client->connection.n_in_flight);
	cJSON_AddNumberToObject(item, "output_bytes", (double)client->connection.output_bytes);
}

static cJSON *front_json(const struct front *front, uint32_t uid, bool all)
{
	cJSON *item = cJSON_CreateObject(), *list;

	cJSON_AddNumberToObject(item, "pid", getpid());
	cJSON_AddNumberToObject(item, "resident_bytes", (double)status_resident_bytes());
	cJSON_AddNumberToObject(item, "uptime_s",
				(double)((clock_ns() - front->started_ns) / NS_PER_S));
	cJSON_AddNumberToObject(item, "connections", front->n_clients);
	cJSON_AddNumberToObject(item, "accepted", (double)front->n_accepted);
	cJSON_AddNumberToObject(item, "refused", (double)front->n_refused);
	cJSON_AddNumberToObject(item, "frames", (double)front->hub.n_frames);
	cJSON_AddNumberToObject(item, "violations", (double)front->hub.n_violations);
	cJSON_AddItemToObject(item, "errors", status_errors(front->hub.n_errors));
	list = cJSON_AddArrayToObject(item, "clients");
	list_for_each_entry(struct client, client, &front->clients, in_clients) {
		if (all || client->uid == uid)
			add_client(list, client);
	}
	cJSON_AddItemToObject(item, "limits", status_limits(&front->limits));
	if (front->doing.measures)
		cJSON_AddItemToObject(item, "loop", status_loop(&front->doing));
	cJSON_AddItemToObject(item, "compile", builder_status_json(front->builder));
	cJSON_AddItemToObject(item, "pools", pools_json(front->pools, uid, all));
	return item;
}

/* The lines of one user's sessions, in brackets; given, cJSON_free(). NULL: out of memory, and so no document
 * is made. */
static char *sessions_of(const char *lines, uint32_t uid, bool all)
{
	char *list = cJSON_malloc(strlen(lines) + 3), begin[32];
	size_t n = 1, length = (size_t)snprintf(begin, sizeof(begin), "\n{\"uid\":%u,", uid);

	if (!list)
		return NULL;
	list[0] = '[';
	for (const char *line = lines, *next; *line; line = next) {
		next = strchr(line + 1, '\n');
		next = next ? next : line + strlen(line);
		if (!all && strncmp(line, begin, length) != 0)
			continue;
		memcpy(list + n, line, (size_t)(next - line));
		n += (size_t)(next - line);
	}
	n -= list[n - 1] == ','; /* others' followed */
	list[n++] = ']';
	list[n] = '\0';
	return list;
}

/* The worker's part without what the caller may not see: what is shown to all is that of @part itself. */
static cJSON *worker_json(const struct status_part *part, uint32_t uid, bool all)
{
	cJSON *copy = cJSON_CreateObject();
	char *list = sessions_of(part->sessions, uid, all);
	cJSON *item;

	cJSON_ArrayForEach(item, part->answer)
	{
		cJSON_AddItemReferenceToObject(copy, item->string, item);
	}
	cJSON_AddRawToObject(copy, "sessions", list ? list : "[]");
	cJSON_free(list);
	return copy;
}

static bool is_of_device(const struct quarantine_entry *entry, const struct worker_slot *slot)
{
	return entry->what.kernel[0] && entry->device == slot->index;
}

/* A sum: whose they are it does not tell. */
static uint32_t count_quarantined(const struct worker_slot *slot)
{
	const struct quarantine *quarantine = &slot->front->quarantine;
	uint64_t now = clock_ns();
	uint32_t n = 0;

	for (uint32_t i = 0; i < QUARANTINE_ENTRIES; i++)
		n += quarantine_is_active(&quarantine->entries[i], now) &&
		     is_of_device(&quarantine->entries[i], slot);
	return n;
}

/* What concerns other users is shown to privileged callers only. */
static cJSON *quarantine_json(const struct worker_slot *slot, uint32_t uid, bool all)
{
	const struct quarantine *quarantine = &slot->front->quarantine;
	cJSON *list = cJSON_CreateArray();
	uint64_t now = clock_ns();

	for (uint32_t i = 0; i < QUARANTINE_ENTRIES; i++) {
		const struct quarantine_entry *entry = &quarantine->entries[i];
		bool everybody = entry->what.everybody;
		cJSON *item;

		if (!quarantine_is_active(entry, now) ||
		    (entry->what.kernel[0] && !is_of_device(entry, slot)) ||
		    (!all && !everybody && entry->what.uid != uid))
			continue;
		item = json_add_item(list);
		/* Without a kernel it is the user who may open no device. */
		if (entry->what.kernel[0])
			cJSON_AddStringToObject(item, "kernel", entry->what.kernel);
		if (!everybody)
			cJSON_AddNumberToObject(item, "uid", entry->what.uid);
		cJSON_AddNumberToObject(item, "remaining_s",
					(double)((entry->what.until_ns - now) / NS_PER_S));
	}
	return list;
}

static cJSON *device_json(const struct worker_slot *slot, const struct status_part *part,
			  uint32_t uid, bool all)
{
	const struct proto_device *device = &slot->device;
	cJSON *item = cJSON_CreateObject();

	cJSON_AddNumberToObject(item, "device", slot->index);
	cJSON_AddStringToObject(item, "name", device->name);
	cJSON_AddStringToObject(item, "arch", device->arch);
	cJSON_AddStringToObject(item, "backend", device->backend);
	cJSON_AddStringToObject(item, "state", worker_state_name(slot->state));
	cJSON_AddNumberToObject(item, "compute_units", device->compute_units);
	if (device->pci[0])
		cJSON_AddStringToObject(item, "pci", device->pci);
	cJSON_AddNumberToObject(item, "worker_pid", worker_slot_pid(slot));
	cJSON_AddNumberToObject(item, "starts", slot->n_starts);
	cJSON_AddNumberToObject(item, "deaths", slot->n_deaths);
	cJSON_AddStringToObject(item, "last_death", slot->reason);
	cJSON_AddItemToObject(item, "quarantined", quarantine_json(slot, uid, all));
	cJSON_AddNumberToObject(item, "n_quarantined", count_quarantined(slot));
	cJSON_AddItemToObject(item, "tuned", tuned_status_json(slot));
	cJSON_AddItemToObject(item, "worker",
			      part->answer ? worker_json(part, uid, all) : cJSON_CreateNull());
	return item;
}

/* What user @uid may see; given. */
static cJSON *status_json(const struct status_gathering *gathering, uint32_t uid, bool all)
{
	struct front *front = gathering->front;
	cJSON *root = cJSON_CreateObject(), *list;

	cJSON_AddStringToObject(root, "version", FMHA_VERSION);
	cJSON_AddStringToObject(root, "state", front_state_name(front));
	cJSON_AddItemToObject(root, "front", front_json(front, uid, all));
	list = cJSON_AddArrayToObject(root, "devices");
	for (uint32_t i = 0; i < front->n_slots; i++)
		cJSON_AddItemToArray(list,
				     device_json(&front->slots[i], &gathering->parts[i], uid, all));
	return root;
}

/* The same as text; given. NULL: out of memory. */
static char *status_text(const struct status_gathering *gathering, const struct client *caller)
{
	bool all = config_is_privileged(&gathering->front->config, caller->uid);

	json_begin();
	return json_end(status_json(gathering, caller->uid, all), false);
}

/* The text in a file, made once for all who get it. */
struct status_file {
	int fd; /* -1: not made */
	uint64_t size;
	struct fmha_error error;
};

static void make_file(struct status_gathering *gathering, struct client *client,
		      struct status_file *file)
{
	char *text = status_text(gathering, client);

	file->size = text ? strlen(text) : 0;
	if (text)
		(void)memfd_text(&client->front->memfds, client->account, text, file->size,
				 &file->fd, &file->error);
	else
		(void)fmha_error_set(&file->error, FMHA_ENOMEM, "status: no memory for the answer");
	cJSON_free(text);
}

static void status_answer(struct client *client, uint32_t id, struct status_file *file)
{
	struct proto_json_result result = {.size = file->size};
	int fd = file->fd >= 0 ? memfd_again(file->fd) : -1;

	if (file->fd >= 0 && fd < 0)
		(void)fmha_error_set(&file->error, FMHA_EBUSY, "status: no descriptor is left");
	if (fd < 0)
		connection_answer_error(&client->connection, id, &file->error);
	else
		connection_answer(&client->connection, id, PROTO_STATUS, &result, fd);
}

/* Everybody who waits and is the same user gets the same text: it is made once, on that user's
 * time. */
static void answer_user(struct status_gathering *gathering, struct account *account)
{
	struct status_file file = {.fd = -1};
	struct doing_before before = doing_begin(&gathering->front->doing, PROTO_STATUS,
						 account->uid);
	uint64_t start_ns = clock_ns(), now;

	account->n_references++; /* answering may end its last connection */
	list_for_each_entry(struct status_waiter, waiter, &gathering->waiters, in_waiters) {
		if (!waiter->client || waiter->client->account != account)
			continue;
		if (file.fd < 0 && file.error.code == FMHA_OK)
			make_file(gathering, waiter->client, &file);
		list_remove(&waiter->in_waiters);
		status_answer(waiter->client, waiter->id, &file);
		free(waiter);
	}
	if (file.fd >= 0)
		(void)close(file.fd);
	now = clock_ns();
	account_add_loop_ns(account, now, now - start_ns);
	doing_end(&gathering->front->doing, before);
	(void)account_put(account);
}

/* As no user sees it; given. NULL: memory has run out before it was whole. */
static cJSON *status_of_nobody(const struct status_gathering *gathering)
{
	cJSON *status = NULL;
	char *text;

	json_begin();
	text = json_end(status_json(gathering, NO_USER, false), false);
	if (text)
		(void)json_from_text(text, strlen(text), NULL, &status);
	free(text);
	return status;
}

/* The daemon itself asks for sums: it sees no user's. */
static void answer_readers(struct status_gathering *gathering)
{
	cJSON *status = NULL;

	list_for_each_entry(struct status_waiter, waiter, &gathering->waiters, in_waiters) {
		if (waiter->client)
			continue;
		if (!status)
			status = status_of_nobody(gathering);
		list_remove(&waiter->in_waiters);
		waiter->reader(waiter->owner, status);
		free(waiter);
	}
	cJSON_Delete(status);
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct status_gathering *gathering = container_of((uv_timer_t *)handle,
							  struct status_gathering, timer);

	for (int i = 0; i < PROTO_MAX_DEVICES; i++) {
		cJSON_Delete(gathering->parts[i].answer);
		free(gathering->parts[i].sessions);
	}
	free(gathering);
}

static void status_finish(struct status_gathering *gathering)
{
	struct front *front = gathering->front;

	front->status = NULL;
	front->status_ended_ns = clock_ns();
	for (uint32_t i = 0; i < front->n_slots; i++)
		if (gathering->parts[i].asked)
			worker_slot_forget(&front->slots[i], &gathering->parts[i]);
	answer_readers(gathering);
	while (!list_is_empty(&gathering->waiters))
		answer_user(gathering,
			    container_of(gathering->waiters.next, struct status_waiter, in_waiters)
				    ->client->account);
	uv_close((uv_handle_t *)&gathering->timer, on_timer_closed);
}

static void finish_if_complete(struct status_gathering *gathering)
{
	if (!gathering->asking)
		return;
	for (uint32_t i = 0; i < gathering->front->n_slots; i++)
		if (gathering->parts[i].asked)
			return;
	status_finish(gathering);
}

static void status_on_timer(uv_timer_t *timer)
{
	status_finish(container_of(timer, struct status_gathering, timer));
}

/* Takes a worker's document apart: its sessions stay text, as thousands of them would take long to be
 * parsed, copied and printed again. */
static void take_apart(char *text, struct status_part *part)
{
	static const char begin[] = "{\"sessions\":[";
	char *end = strncmp(text, begin, strlen(begin)) == 0 ? strstr(text, "\n],") : NULL;

	if (!end)
		return;
	*end = '\0';
	end[2] = '{';
	part->sessions = strdup(text + strlen(begin));
	if (part->sessions)
		part->answer = cJSON_Parse(end + 2);
}

static void read_answer(int fd, uint64_t size, struct status_part *part)
{
	char *text;

	if (size == 0 || size > MAX_JSON_BYTES)
		return;
	text = malloc(size + 1);
	if (text && pread(fd, text, size, 0) == (ssize_t)size) {
		text[size] = '\0';
		take_apart(text, part);
	}
	free(text);
}

static void on_answer(void *owner, const union proto_any_result *result, int fd,
		      const struct fmha_error *error)
{
	struct status_part *part = owner;

	(void)error; /* nothing is shown in its place */
	part->asked = false;
	if (result && fd >= 0)
		read_answer(fd, result->WORKER_STATUS.size, part);
	finish_if_complete(part->gathering);
}

static void status_ask(uv_timer_t *timer)
{
	struct status_gathering *gathering = container_of(timer, struct status_gathering, timer);
	struct front *front = gathering->front;

	uv_timer_start(timer, status_on_timer, front->config.supervision.status_ms, 0);
	for (uint32_t i = 0; i < front->n_slots; i++) {
		struct status_part *part = &gathering->parts[i];

		part->gathering = gathering;
		part->asked = worker_slot_request(&front->slots[i], PROTO_WORKER_STATUS,
						  &(struct proto_empty){0}, -1, on_answer, part);
	}
	gathering->asking = true;
	finish_if_complete(gathering);
}

static struct status_gathering *start(struct front *front)
{
	struct status_gathering *gathering = calloc(1, sizeof(*gathering));
	uint64_t now = clock_ns(), due_ns = front->status_ended_ns + PAUSE_MS * NS_PER_MS;

	if (!gathering)
		return NULL;
	gathering->front = front;
	list_init(&gathering->waiters);
	uv_timer_init(&front->loop, &gathering->timer);
	uv_timer_start(&gathering->timer, status_ask, due_ns > now ? (due_ns - now) / NS_PER_MS : 0,
		       0);
	return gathering;
}

void status_request(struct client *client, uint32_t id)
{
	struct front *front = client->front;
	struct status_waiter *waiter = calloc(1, sizeof(*waiter));
	struct fmha_error err;

	if (waiter && !front->status)
		front->status = start(front);
	if (!waiter || !front->status) {
		free(waiter);
		fmha_error_set(&err, FMHA_ENOMEM, "status: out of memory");
		connection_answer_error(&client->connection, id, &err);
		return;
	}
	waiter->client = client;
	waiter->id = id;
	list_append(&front->status->waiters, &waiter->in_waiters);
}

int status_read(struct front *front, status_reader reader, void *owner)
{
	struct status_waiter *waiter = calloc(1, sizeof(*waiter));

	if (waiter && !front->status)
		front->status = start(front);
	if (!waiter || !front->status) {
		free(waiter);
		return FMHA_ENOMEM;
	}
	waiter->reader = reader;
	waiter->owner = owner;
	list_append(&front->status->waiters, &waiter->in_waiters);
	return 0;
}

void status_unread(struct front *front, const void *owner)
{
	if (!front->status)
		return;
	list_for_each_entry(struct status_waiter, waiter, &front->status->waiters, in_waiters) {
		if (waiter->client || waiter->owner != owner)
			continue;
		list_remove(&waiter->in_waiters);
		free(waiter);
	}
}

void status_forget(struct client *client)
{
	if (!client->front->status)
		return;
	list_for_each_entry(struct status_waiter, waiter, &client->front->status->waiters,
			    in_waiters) {
		if (waiter->client != client)
			continue;
		list_remove(&waiter->in_waiters);
		free(waiter);
	}
}
