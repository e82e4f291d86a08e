/* SPDX-License-Identifier: MIT */
#include "process.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <base/cgroup.h>
#include <base/clock.h>
#include <proto/cleanup.h>
#include <proto/error.h>

/* ---- the end ---- */

void worker_process_kill(struct worker_process *process, enum kill_reason reason)
{
	if (!process || !process->process_alive)
		return;
	process->killed = reason;
	uv_process_kill(&process->process, SIGKILL);
}

static void process_freep(struct worker_process **process)
{
	if (*process && (*process)->page)
		munmap((*process)->page, sizeof(*(*process)->page));
	free(*process);
}

static void release_process(struct worker_process *process)
{
	if (--process->n_open == 0)
		process_freep(&process);
}

void worker_process_on_control_closed(struct connection *control)
{
	release_process(container_of(control, struct worker_process, control));
}

static void on_process_closed(uv_handle_t *handle)
{
	release_process(container_of((uv_process_t *)handle, struct worker_process, process));
}

void worker_process_close(struct worker_process *process)
{
	process->process_alive = false;
	process->leaving = true;
	connection_close(&process->control);
	uv_close((uv_handle_t *)&process->process, on_process_closed);
}

void worker_process_describe_death(const struct worker_process *process, int64_t status, int signal,
				   char *reason, size_t n)
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
	else if (signal == SIGKILL && cgroup_oom_kills("/proc", "/sys") > process->oom_kills)
		snprintf(
			reason, n,
			"the worker was killed by the kernel: out of memory (see MemoryMax= of the "
			"unit, or the machine's memory)");
	else if (signal)
		snprintf(reason, n, "the worker was ended by signal %d (%s)", signal,
			 strsignal(signal));
	else
		snprintf(reason, n, "the worker exited with status %d", (int)status);
	if (process->during && !page->culprit[0]) {
		size_t used = strlen(reason);

		snprintf(reason + used, n - used, " during %s", process->during);
	}
}

/* What the loop did when the worker ended; 0: nothing that anybody is to blame for. A crash has left
 * that of its thread. Another process's SIGKILL, the machine's out of memory or an administrator's,
 * says nothing about the request that it met. */
static uint64_t last_doing(const struct worker_process *process, int signal)
{
	struct worker_page *page = process->page;

	if (atomic_load(&page->crashed))
		return page->crashed_doing;
	if (signal == SIGKILL && process->killed != KILL_SILENT)
		return 0;
	return atomic_load(&page->doing.word);
}

struct worker_death worker_process_culprit(struct worker_process *process, int signal)
{
	struct worker_page *page = process->page;
	uint64_t word = last_doing(process, signal);
	bool on_loop = process->killed == KILL_SILENT && atomic_load(&page->loop_busy);
	struct worker_death death = {
		.device = process->slot->index, .kernel = "", .uid = WORKER_NO_USER};

	page->culprit[sizeof(page->culprit) - 1] = '\0';
	page->loop_kernel[sizeof(page->loop_kernel) - 1] = '\0';
	page->reason[sizeof(page->reason) - 1] = '\0';
	if (page->culprit[0]) {
		death.kernel = page->culprit;
		death.code = page->culprit_code;
		death.uid = page->culprit_uid;
		death.problem = page->culprit_problem;
	} else if (on_loop) {
		death.kernel = page->loop_kernel;
		death.code = page->loop_code;
		death.uid = page->loop_uid;
		death.problem = page->loop_problem;
	} else if (page->reason[0] == '\0' && doing_name(word)) {
		process->during = death.during = doing_name(word);
		death.uid = (uint32_t)word;
	}
	death.trusted = death.uid == WORKER_NO_USER ||
			config_is_privileged(&process->front->config, death.uid);
	return death;
}

static void show_quarantine(const struct worker_slot *slot, struct worker_page *page)
{
	struct worker_quarantine what;

	quarantine_list(&slot->front->quarantine, slot->index, clock_ns(), &what);
	worker_page_set_quarantine(page, &what);
}

void worker_process_show_quarantine(struct worker_slot *slot)
{
	if (slot->process)
		show_quarantine(slot, slot->process->page);
}

void worker_process_configure(struct worker_process *process)
{
	if (!process)
		return;
	worker_page_set_config(process->page, &process->front->config);
	/* One that is starting may not know the signal yet; it is told when it is ready. */
	if (process->slot && process->slot->state == WORKER_READY)
		uv_process_kill(&process->process, SIGHUP);
}

/* ---- the beginning ---- */

static struct worker_page *make_page(const struct worker_slot *slot, int *ret_fd)
{
	_cleanup_(closep) int fd = memfd_create("fmhad worker page", MFD_CLOEXEC);
	struct worker_page *page;

	if (fd < 0 || ftruncate(fd, sizeof(*page)) < 0)
		return NULL;
	page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		return NULL;
	page->magic = WORKER_PAGE_MAGIC;
	page->bytes = sizeof(*page);
	page->device = slot->index;
	worker_page_set_config(page, &slot->front->config);
	/* The card that the slot has had, not the one that has its number now. */
	if (slot->device.pci[0])
		snprintf(page->config.devices[slot->index].pci, PCI_BYTES, "%.*s", PCI_BYTES - 1,
			 slot->device.pci);
	page->culprit_uid = page->loop_uid = WORKER_NO_USER;
	show_quarantine(slot, page);
	*ret_fd = take_fd(&fd);
	return page;
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

/* Return: of uv_spawn(). */
static int spawn(struct worker_process *process, uv_exit_cb on_exit, char **environment,
		 int control_fd, int page_fd)
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
	uv_process_options_t options = {.exit_cb = on_exit,
					/* Also right when the file was replaced meanwhile. */
					.file = "/proc/self/exe",
					.args = arguments,
					.stdio_count = 5,
					.stdio = stdio,
					.env = environment};

	snprintf(title, sizeof(title), "fmhad-worker/%u", process->slot->index);
	return uv_spawn(&process->front->loop, &process->process, &options);
}

static struct worker_process *process_new(struct worker_slot *slot, builder_done compiled,
					  int *ret_page_fd)
{
	struct worker_process *process = calloc(1, sizeof(*process));

	if (!process)
		return NULL;
	process->slot = slot;
	process->front = slot->front;
	process->oom_kills = cgroup_oom_kills("/proc", "/sys");
	process->compiles = (struct builder_asker){.done = compiled, .owner = process};
	list_init(&process->compiles.requests);
	process->page = make_page(slot, ret_page_fd);
	return process;
}

int worker_process_start(struct worker_slot *slot, const struct connection_ops *ops,
			 builder_done compiled, uv_exit_cb on_exit, struct fmha_error *err)
{
	_cleanup_(closep) int page_fd = -1, ours = -1, theirs = -1;
	_cleanup_(process_freep) struct worker_process *process = process_new(slot, compiled,
									      &page_fd);
	_cleanup_(freep) char **environment = worker_environment();
	struct worker_process *started = process;
	int pair[2], r;

	if (!process || !environment)
		return fmha_error_set(err, FMHA_ENOMEM, "worker: out of memory");
	if (!process->page ||
	    socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0)
		return fmha_error_set(err, FMHA_EIO, "worker: %s", strerror(errno));
	ours = pair[0];
	theirs = pair[1];
	r = spawn(process, on_exit, environment, theirs, page_fd);
	process = NULL; /* its handles' from now on */
	started->n_open = 1;
	if (r < 0) {
		started->slot = NULL;
		uv_close((uv_handle_t *)&started->process, on_process_closed);
		return fmha_error_set(err, FMHA_EIO, "worker: %s", uv_strerror(r));
	}
	started->process_alive = true;
	slot->process = started;
	if (connection_open(&started->control, &slot->front->hub, take_fd(&ours), NULL, false, ops,
			    err) < 0) {
		started->control.closing = true; /* it never was open */
		worker_process_kill(started, KILL_SOCKET_CLOSED);
		return FMHA_EIO;
	}
	started->n_open = 2;
	return 0;
}

void worker_slot_forget(struct worker_slot *slot, const void *owner)
{
	if (slot->process)
		(void)connection_forget(&slot->process->control, owner);
}
