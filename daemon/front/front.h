/* SPDX-License-Identifier: MIT */
/*
 * front.h: the process that everybody connects to. It checks who is calling, counts what each user
 * has, keeps one worker process a device alive, and hands clients their direct socket to a worker.
 * It opens no device and runs no kernel, so no fault of theirs can end it.
 */
#ifndef FMHAD_FRONT_H
#define FMHAD_FRONT_H

#include <cjson/cJSON.h>
#include <uv.h>

#include <base/account.h>
#include <base/connection.h>
#include <base/memfd.h>
#include <base/worker_page.h>

#include "quarantine.h"

struct front;
struct worker_process;
struct model;

enum worker_state {
	WORKER_STARTING, /* the process runs and has not said that it is ready */
	WORKER_READY,
	WORKER_RESTARTING, /* dead; the next one starts when the pause is over */
	WORKER_FAILED,     /* as restarting, after several starts that came to nothing */
	WORKER_STOPPED,    /* the daemon ends */
};

/* One device and whichever process serves it at the moment. */
struct worker_slot {
	struct front *front;
	uint32_t index;
	enum worker_state state;
	struct worker_process *process; /* NULL: none runs */
	struct proto_device device;     /* as the last worker described it */
	uv_timer_t timer;               /* start timeout, heartbeat, pause */
	uint64_t timer_due_ns;          /* when it should fire */
	struct list opens;              /* struct open_request: clients that wait for the device */
	bool beating;                   /* heartbeats go on: clients are attached */
	bool drained;
	uint32_t n_failed_starts, n_starts, n_deaths;
	char reason[256];    /* of the last death */
	struct model *tuned; /* tuned.c: of its worker's model; NULL: none is ready */
};

/*
 * A client that asked for a device, until the worker has taken its socket; also when the client has
 * gone meanwhile, as the worker's end of it lies in the control socket and stays charged.
 */
struct open_request {
	struct list in_slot, in_client;
	struct worker_slot *slot;
	struct client *client;   /* NULL: gone */
	struct account *account; /* NULL: the client's connection holds the worker's end */
	uint32_t id;             /* of the client's request */
	bool sent;               /* to the worker, which has not answered yet */
	int fd;                  /* the client's end; -1: not made yet */
};

struct client {
	struct connection connection;
	struct front *front;
	struct account *account;
	struct list in_clients;
	struct list opens;
	struct list pools;         /* pools.c: those that it has open */
	struct list pool_openings; /* and those that it waits for */
	uint32_t last_pool;
	uint32_t uid, gid, pid;
	char name[PROTO_NAME_BYTES];
	bool greeted;
};

struct status_gathering;
struct builder;
struct tuned;
struct pools;

struct front {
	uv_loop_t loop;
	struct config config;
	const struct config_source *source;
	struct limits limits;
	struct accounts accounts;
	struct quarantine quarantine;
	struct connection_hub hub;
	struct doing doing;
	struct memfds memfds;
	int listen_fd;
	bool inherited_listener; /* by socket activation: not ours to unlink */
	bool accepting, draining;
	bool announced; /* READY=1 was sent */
	bool degraded;  /* and a device is out of order, as the log says */
	bool finishing; /* the workers were told to go */
	int exit_status;
	void (*on_drained)(struct front *front); /* a worker has nothing to do any more */
	void (*on_left)(
		struct front *front); /* a connection is gone: there may be room for another */
	uv_poll_t listener;
	uv_timer_t accept_again, watchdog, drain;
	uv_signal_t on_term, on_int, on_hangup;
	bool on_terminal; /* stderr was one when the daemon started */
	struct list clients;
	uint32_t n_clients;
	struct worker_slot slots[PROTO_MAX_DEVICES];
	uint32_t n_slots;
	uint64_t next_session;
	struct status_gathering *status; /* NULL: nobody asks */
	uint64_t status_ended_ns;        /* when the last one was answered */
	struct builder *builder;
	struct http *http; /* NULL: none */
	struct tuned *tuned;
	struct pools *pools;
	void (*device_ready)(const struct worker_slot *slot); /* told when a worker is ready */
	struct log_limit log;
	uint64_t n_accepted, n_refused, started_ns;
};

/* ---- front.c ---- */

/* Runs the daemon until it is told to stop. Return: exit status. */
/* @source: where @config was read from, to be read again on SIGHUP; kept */
int front_run(const struct config *config, const struct config_source *source);

/* ---- reload.c ---- */

/* Takes over what can be taken over of the configuration, which is read again. */
void front_reload(struct front *front);

/* ---- health.c ---- */

const char *worker_state_name(enum worker_state state);
uint32_t worker_slot_pid(const struct worker_slot *slot);
/* Several starts came to nothing and none has succeeded since, whether or not one is being tried.
 */
bool worker_slot_has_failed(const struct worker_slot *slot);
/* Tells the service manager what the daemon is doing, and that it is ready once it is. */
void front_announce(struct front *front);
/* "starting", "ready", "degraded" (a device is out of order, be it all of them) or "stopping". */
const char *front_state_name(const struct front *front);

/* ---- listen.c ---- */

/* The socket at config.socket, or the inherited one. Return: 0, FMHA_EINVAL, FMHA_EIO. */
int listen_open(struct front *front, struct fmha_error *err);
void listen_close(struct front *front);
/* A socket at @path that nobody else listens at, with the configuration's group and mode. Return: 0
 * with the fd (given), FMHA_EINVAL, FMHA_EIO. */
int listen_at(const struct config *config, const char *path, int *ret_fd, struct fmha_error *err);

/* ---- client.c ---- */

/* @fd: taken. */
void client_new(struct front *front, int fd);

/* ---- open_device.c: clients that wait for a device ---- */

/* A client asks: it waits until the worker has answered. Return: 0, FMHA_ENOMEM. */
int open_request_new(struct worker_slot *slot, struct client *client, uint32_t id,
		     struct fmha_error *err);
/* The client is gone. */
void open_request_forget(struct open_request *open);
/* The worker is ready: asks it for those that it was not asked for. Return: whether any was. */
bool open_request_attach_all(struct worker_slot *slot);
void open_request_refuse_all(struct worker_slot *slot, int code, const char *reason);

/* ---- supervise.c ---- */

void worker_slot_init(struct front *front, uint32_t index);
void worker_slot_start(struct worker_slot *slot);
/* Return: 0: answered when the worker has; FMHA_EDEVICE, FMHA_EBUSY, FMHA_ENOMEM. */
int worker_slot_open(struct worker_slot *slot, struct client *client, uint32_t id,
		     struct fmha_error *err);
void worker_slot_drain(struct worker_slot *slot);
/* Ends the process, for good. */
void worker_slot_stop(struct worker_slot *slot, bool now);
bool worker_slot_is_over(const struct worker_slot *slot);
/* Asks the worker as connection_request() does; @fd: taken. Return: false: none is ready. */
bool worker_slot_request(struct worker_slot *slot, enum proto_method method, const void *params,
			 int fd, connection_reply reply, void *owner);

/* ---- process.c ---- */

/* @owner does not wait any more for what worker_slot_request() has asked. */
void worker_slot_forget(struct worker_slot *slot, const void *owner);

/* ---- http.c ---- */

struct http;
/* Serves metrics at config.metrics_socket, if there is one. Return: 0, or FMHA_EIO, FMHA_EINVAL. */
int http_open(struct front *front, struct fmha_error *err);
void http_close(struct front *front);

/* ---- status.c ---- */

/* @status: without other users' sessions, borrowed */
typedef void (*status_reader)(void *owner, const cJSON *status);
/* For the daemon itself. Return: 0 or FMHA_ENOMEM. */
int status_read(struct front *front, status_reader reader, void *owner);
/* @owner does not wait for it any more. */
void status_unread(struct front *front, const void *owner);

void status_request(struct client *client, uint32_t id);
/* The client is gone. */
void status_forget(struct client *client);

#endif
