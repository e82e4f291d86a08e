/* SPDX-License-Identifier: MIT */
/* fail.c: the end of a worker whose device, or whose own code, is beyond use: who is to blame, and who is told. */
#include "run/request.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <base/log.h>
#include <device/guard.h>

/* The crash handler has no argument to find it by. */
static struct worker_page *crash_page;

/* @kernel: the first member of a struct culprit. Safe in a signal handler. */
static void blame(struct worker_page *page, const char *kernel)
{
	const struct culprit *culprit = (const void *)kernel;

	_Static_assert(offsetof(struct culprit, kernel) == 0, "its name stands for it");
	memcpy(page->culprit, culprit->kernel, sizeof(page->culprit));
	page->culprit_code = culprit->code;
	page->culprit_uid = culprit->uid;
	page->culprit_problem = culprit->problem;
}

static void on_crash(int signal)
{
	const char *kernel = device_current_kernel();

	(void)signal;
	if (!crash_page)
		return;
	if (kernel)
		blame(crash_page, kernel);
	else if (getpid() == gettid())
		crash_page->crashed_doing = atomic_load(&crash_page->doing.word);
	else
		crash_page->crashed_doing = offload_doing();
	atomic_store(&crash_page->crashed, 1);
}

void worker_report_crashes(struct worker_page *page)
{
	crash_page = page;
	guard_install(on_crash);
}

void worker_answer_all(struct worker *worker, const struct fmha_error *error)
{
	list_for_each_entry(struct request, request, &worker->runs.requests, in_worker) {
		connection_answer_error(&request->session->connection, request->id, error);
	}
}

void worker_fail(struct worker *worker, const char *kernel, const struct fmha_error *error)
{
	struct fmha_error err = *error;

	err.code = FMHA_EDEVICE;
	if (kernel && *kernel)
		blame(worker->page, kernel);
	snprintf(worker->page->reason, sizeof(worker->page->reason), "%s", err.msg);
	log_write_about(&(struct log_about){.kernel = kernel && *kernel ? kernel : NULL},
			LOG_LEVEL_ERROR, "device %s: %s", device_get_info(worker->device)->name,
			err.msg);
	worker_answer_all(worker, &err);
	/* Threads may hang inside the device: nothing is joined or freed. */
	_exit(WORKER_EXIT_DEVICE);
}
