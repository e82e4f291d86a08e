/* SPDX-License-Identifier: MIT */
/*
 * worker_registry.c: the worker's registry and the methods that clients have on it. Those that walk every
 * kernel that the device can have run on a work thread; the session stays until they end.
 *
 * Anybody may export and get; shapes, times and counts of runs tell of other users and are for administrators. What changes the choice of kernels for everybody is for administrators,
 * and goes through the front (changes.c).
 */
#include "worker_registry.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <proto/cleanup.h>
#include <base/log.h>
#include <dispatch/model.h>
#include <catalogue/backends.h>
#include <proto/error.h>

#define DOCUMENT_BYTES (64u << 20) /* the largest document, in and out */

/* ---- the registry ---- */

/* Without one the cost formula alone decides. */
static void open_model(struct worker *worker)
{
	const char *arch = device_get_info(worker->device)->arch;
	struct fmha_error err;

	if (predict_model_load(arch, &worker->plans.model, &err) < 0)
		log_warning("no model of %s: %s", arch, err.msg);
}

int kernels_open(struct worker *worker, struct fmha_error *err)
{
	const struct device_info *info = device_get_info(worker->device);
	struct registry_device device = {0};
	int r = spec_catalog_own(fmha_backends, &worker->plans.catalog, err);

	if (r < 0)
		return r;
	memcpy(device.name, info->model, sizeof(device.name));
	registry_device_archs(&device, info->arch);
	r = registry_new(worker->plans.catalog, &device, &worker->plans.registry, err);
	if (r == FMHA_ENOENT || r == FMHA_EINVAL) {
		log_warning("device %s: no kernel specs: %s", info->name, err->msg);
		return 0;
	}
	if (r < 0)
		return r;
	kernels_mark_quarantine(worker);
	open_model(worker);
	log_info("device %s: %llu kernels for %s", info->name,
		 (unsigned long long)registry_count(worker->plans.registry), info->arch);
	return 0;
}

void kernels_count_run(struct worker *worker, struct session_plan *session_plan, uint64_t ns)
{
	const struct plan *plan = &session_plan->plan;

	for (uint32_t i = 0; worker->plans.registry && i < plan->n_stages; i++)
		if (plan->stages[i].has_spec)
			registry_add_run(worker->plans.registry, &plan->stages[i].spec,
					 plan->n_stages == 1 ? ns : 0, &session_plan->entries[i]);
}

/* ---- methods ---- */

struct kernels_job {
	struct offload offload;
	struct session *session;
	uint32_t id;
	enum proto_method method;
	char filter[sizeof(((struct proto_registry_export_params *)0)->filter)];
	char set[PROTO_NAME_BYTES];
	int fd; /* in: the document; out of an export: the result; of a change: what the front keeps */
	bool all; /* an export with what users have run */
	uint64_t bytes, n_kernels;
	int result;
	struct fmha_error error;
};

static int export(struct kernels_job *job)
{
	int fd = memfd_create("fmhad registry", MFD_CLOEXEC | MFD_ALLOW_SEALING), r;
	FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
	struct stat st = {0};

	if (!file) {
		closep(&fd);
		return fmha_error_set(&job->error, FMHA_ENOMEM, "export: no memory file");
	}
	r = registry_export(job->session->worker->plans.registry, job->filter, job->all,
			    DOCUMENT_BYTES, file, &job->error);
	job->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	(void)fclose(file);
	if (r == 0 && (job->fd < 0 || fstat(job->fd, &st) < 0 || !memfd_seal(job->fd)))
		r = fmha_error_set(&job->error, FMHA_EIO, "export: cannot seal the result");
	job->bytes = (uint64_t)st.st_size;
	return r;
}

static int with_document(struct kernels_job *job)
{
	struct registry *registry = job->session->worker->plans.registry;
	char *text = NULL;
	size_t size = 0;
	int r = memfd_read(job->fd, DOCUMENT_BYTES, &text, &size, &job->error);

	if (r < 0)
		return r;
	closep(&job->fd); /* its client can still change it */
	job->fd = -1;
	if (job->method == PROTO_REGISTRY_IMPORT) {
		r = registry_import(registry, text, size, &job->n_kernels, &job->error);
		free(text);
		text = NULL;
		if (r == 0)
			r = registry_state_text(registry, &text, &job->error);
		if (r != 0)
			return r;
		size = strlen(text);
	} else {
		r = registry_load_set(registry, job->set, text, size, &job->n_kernels, &job->error);
	}
	if (r == 0)
		job->fd = memfd_file(text, size);
	if (r == 0 && job->fd < 0)
		r = fmha_error_set(&job->error, FMHA_ENOMEM, "document: no memory file");
	free(text);
	return r;
}

static void job_run(struct offload *offload)
{
	struct kernels_job *job = container_of(offload, struct kernels_job, offload);

	if (job->method == PROTO_REGISTRY_EXPORT)
		job->result = export(job);
	else if (job->method == PROTO_REGISTRY_UNLOAD)
		job->result = registry_unload_set(job->session->worker->plans.registry, job->set,
						  &job->n_kernels, &job->error);
	else
		job->result = with_document(job);
}

/* Answers with the exported document, which stays charged as long as the client keeps it. */
static void hand_out(struct kernels_job *job)
{
	struct session *session = job->session;
	struct account *account = session->account;
	struct proto_json_result result = {.size = job->bytes};
	int fd;

	job->result = memfd_keep(&session->worker->memfds, account, job->fd, job->bytes, &fd,
				 &job->error);
	if (job->result < 0) {
		memfd_release(account, DOCUMENT_BYTES);
		return;
	}
	account_release(account, ACCOUNT_MEMORY, DOCUMENT_BYTES - job->bytes);
	connection_answer(&session->connection, job->id, job->method, &result, fd);
}

/* The front keeps what was changed here, tells the other workers, and answers. */
static void pass_on(struct kernels_job *job)
{
	struct proto_registry_change_params params = {
		.change = job->method == PROTO_REGISTRY_IMPORT ? PROTO_CHANGE_MERGE
			  : job->method == PROTO_REGISTRY_LOAD ? PROTO_CHANGE_LOAD
							       : PROTO_CHANGE_UNLOAD,
		.uid = job->session->uid};

	memcpy(params.name, job->set, sizeof(job->set));
	changes_send(job->session, job->id, job->method, &params, take_fd(&job->fd),
		     job->n_kernels);
}

static void job_freep(struct kernels_job **job)
{
	if (*job)
		closep(&(*job)->fd);
	free(*job);
}

static void job_done(struct offload *offload)
{
	_cleanup_(job_freep) struct kernels_job *job = container_of(offload, struct kernels_job,
								    offload);
	struct session *session = job->session;
	struct connection *connection = &session->connection;
	bool exported = job->method == PROTO_REGISTRY_EXPORT && job->result == 0;

	if (exported && !session->hung_up)
		hand_out(job);
	else
		memfd_release(session->account, DOCUMENT_BYTES);
	if (!session->hung_up && job->result < 0)
		connection_answer_error(connection, job->id, &job->error);
	else if (!exported && job->result == 0)
		pass_on(job);
	session->kernels_busy = false;
	session_offload_ended(session);
}

/*
 * One at a time of a user's. How long its result will be nobody knows before, so that it is charged
 * as the longest.
 */
static int charge_job(struct session *session, struct fmha_error *err)
{
	struct account *account = session->account;

	list_for_each_entry(struct session, other, &session->worker->sessions, in_sessions) {
		if (other->account == account && other->kernels_busy)
			return fmha_error_set(err, FMHA_EBUSY,
					      "one registry request of a user at a time");
	}
	return memfd_charge(&session->worker->memfds, account, DOCUMENT_BYTES, err);
}

static int get_kernel(struct session *session, uint32_t id, const char *kernel,
		      struct fmha_error *err)
{
	struct proto_json_result result;
	char *text;
	int fd = -1, r;

	kernels_act_for(session, false);
	r = registry_kernel_text(session->worker->plans.registry, kernel,
				 config_is_privileged(&session->worker->settings, session->uid),
				 &text, err);
	if (r < 0)
		return r;
	result.size = strlen(text);
	r = memfd_text(&session->worker->memfds, session->account, text, result.size, &fd, err);
	free(text);
	if (r == 0)
		connection_answer(&session->connection, id, PROTO_REGISTRY_GET, &result, fd);
	return r;
}

int kernels_request(struct session *session, uint32_t id, enum proto_method method,
		    const union proto_any_params *params, int *fd, struct fmha_error *err)
{
	struct worker *worker = session->worker;
	_cleanup_(job_freep) struct kernels_job *job = NULL;
	int r;

	if (!worker->plans.registry)
		return fmha_error_set_field(err, FMHA_ENOTSUP, "method",
					    "%s: this device has no kernel specs",
					    proto_methods[method].name);
	if (method == PROTO_REGISTRY_GET)
		return get_kernel(session, id, params->REGISTRY_GET.kernel, err);
	if (method != PROTO_REGISTRY_EXPORT &&
	    !config_is_privileged(&worker->page->config, session->uid))
		return fmha_error_set_field(err, FMHA_EPERM, "method", "%s is for administrators",
					    proto_methods[method].name);
	if (method == PROTO_REGISTRY_SET_PRIORITY || method == PROTO_REGISTRY_LIFT ||
	    method == PROTO_REGISTRY_FORGET)
		return changes_request(session, id, method, params, err);
	job = calloc(1, sizeof(*job));
	if (!job)
		return fmha_error_set(err, FMHA_ENOMEM, "registry: out of memory");
	kernels_act_for(session, false);
	job->session = session;
	job->id = id;
	job->method = method;
	job->all = config_is_privileged(&worker->settings, session->uid);
	job->fd = take_fd(fd);
	if (method == PROTO_REGISTRY_EXPORT)
		memcpy(job->filter, params->REGISTRY_EXPORT.filter, sizeof(job->filter));
	else if (method == PROTO_REGISTRY_LOAD)
		memcpy(job->set, params->REGISTRY_LOAD.set, sizeof(job->set));
	else if (method == PROTO_REGISTRY_UNLOAD)
		memcpy(job->set, params->REGISTRY_UNLOAD.set, sizeof(job->set));
	/* One of all users' at a time, so that threads are left for calls of the driver. */
	job->offload = (struct offload){.owner = worker->plans.registry,
					.run = job_run,
					.done = job_done,
					.undo = job_done};
	r = charge_job(session, err);
	if (r < 0)
		return r;
	r = offload_start(&worker->offloads, &job->offload, err);
	if (r < 0) {
		memfd_release(session->account, DOCUMENT_BYTES);
		return r;
	}
	session->kernels_busy = true;
	session->n_offloads++;
	job = NULL; /* the offload's from now on */
	return 0;
}
