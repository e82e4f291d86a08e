/* SPDX-License-Identifier: MIT */
/* process.h: one process that serves a device: its start, its control socket, its death. */
#ifndef FMHAD_FRONT_PROCESS_H
#define FMHAD_FRONT_PROCESS_H

#include "builder.h"
#include "front.h"

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
	struct builder_asker compiles; /* what it waits for */
	uint32_t n_open;               /* handles that hold this struct: process, control */
	bool process_alive;
	enum kill_reason killed;
	bool leaving;       /* told to go: it exits by itself */
	bool hung_up;       /* its control socket is closed... */
	bool was_ready;     /* ...when it was ready */
	const char *during; /* what it died of that is no kernel; NULL: nothing known */
	uint64_t oom_kills; /* in our control group, when it was started */
};

/*
 * Starts a process for the slot, which holds it from then on, also when only its control socket
 * failed: then it is killed and @on_exit comes.
 * @ops: of its control socket, but for on_closed; @compiled: what it has asked to be compiled; @on_exit: it has ended
 * Return: 0 or a negative FMHA_E* code.
 */
int worker_process_start(struct worker_slot *slot, const struct connection_ops *ops,
			 builder_done compiled, uv_exit_cb on_exit, struct fmha_error *err);
/* Takes NULL, and one that is dead. */
void worker_process_kill(struct worker_process *process, enum kill_reason reason);
/* Hands the front's configuration on; takes NULL, and one that is starting. */
void worker_process_configure(struct worker_process *process);
/* Shows its process, if it has any, what is in quarantine on the slot's device. */
void worker_process_show_quarantine(struct worker_slot *slot);
/* It has ended: lets go of what is left of it. */
void worker_process_close(struct worker_process *process);
void worker_process_on_control_closed(struct connection *control);

/* After its end: which kernel, if any, ended it, and whose request that was; and in words. */
struct worker_death worker_process_culprit(struct worker_process *process, int signal);
void worker_process_describe_death(const struct worker_process *process, int64_t status, int signal,
				   char *reason, size_t n);

#endif
