/* SPDX-License-Identifier: MIT */
#include "tuned.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <base/clock.h>
#include <base/memfd.h>
#include <base/log.h>
#include <json/json.h>
#include <proto/cleanup.h>
#include <proto/error.h>
#include <catalogue/backends.h>
#include <specs/catalog.h>
#include <tune/store.h>

#include "builder.h"
#include "process.h"

#define PATIENCE_MS   2000  /* that a worker waits for the disk */
#define SETTLE_MS     200   /* results that come meanwhile are written together */
#define AGAIN_MS      30000 /* after a write has failed */
#define TELL_AGAIN_MS 20
#define MOST_TELLS    25 /* before whoever waits is answered that not all know */
#define LEAVE_MS      2000
#define MOST_DOCUMENT (16u << 20)

/* An answer that a worker waits for: to worker_ready, or to registry_change. */
struct waiter {
	struct list in_model;
	struct worker_slot *slot;
	uint32_t id;
	tuned_restored restored; /* of worker_ready; NULL: of registry_change */
	struct proto_registry_result result;
};

enum work { WORK_NONE, WORK_LOADING, WORK_WRITING };

/* A device model and what is known of it. */
struct model {
	struct list in_tuned;
	struct tuned *tuned;
	struct proto_worker_ready_params key; /* as its workers describe it */
	struct tune_database *database;
	struct tune_database *fresh; /* the work's: what is being loaded */
	bool loaded;
	bool stale; /* another daemon has written since it was loaded */
	bool results_dirty, settings_dirty;
	bool untold;      /* a worker lacks what it is to restore, for want of memory */
	uint32_t n_tells; /* in vain, one after the other */
	uint32_t telling; /* workers that have not said yet that they have it */
	bool results_kept, settings_kept; /* their files may be written over */
	uv_timer_t timer;                 /* to write; while loading: patience */
	uv_work_t work;
	enum work working;
	struct list waiters; /* struct waiter: for what is being loaded, or is to be written */
	struct list written; /* the same, for what is being written */
	/* The work's. */
	struct tune_store_report report;
	char *results_text, *settings_text;
	struct fmha_error error;
	atomic_bool work_ended;
	char fault[256]; /* why nothing is written; "": it is */
};

struct tuned {
	struct front *front;
	struct spec_catalog *catalog;
	struct tune_store store; /* one thread at a time */
	bool storing;            /* a work uses it */
	struct list models;
};

/* ---- workers of a model ---- */

static bool is_of(const struct worker_slot *slot, const struct model *model)
{
	return slot->tuned == model;
}

static bool is_ready(const struct worker_slot *slot, const struct model *model)
{
	return is_of(slot, model) && slot->state == WORKER_READY && slot->process;
}

/* What a worker restores, as a file; -1: none. */
static int worker_file(const struct model *model)
{
	char *text;
	int fd = -1;

	json_begin();
	text = json_end(tune_database_worker_json(model->database), false);
	if (text)
		fd = memfd_file(text, strlen(text));
	free(text);
	return fd;
}

static void tuned_on_timer(uv_timer_t *timer);

static void go_on(struct tuned *tuned);

/* A worker that had no memory for it is told again; one that has died asks by itself. */
static void on_told(void *owner, const union proto_any_result *result, int fd,
		    const struct fmha_error *error)
{
	struct model *model = owner;

	(void)fd;
	model->telling--;
	if (!result && error->code != FMHA_ECONN)
		model->untold = true;
	if (model->untold)
		uv_timer_start(&model->timer, tuned_on_timer, TELL_AGAIN_MS, 0);
	else if (model->telling == 0)
		go_on(model->tuned);
}

static void restore_all(struct model *model)
{
	struct front *front = model->tuned->front;

	model->untold = false;
	for (uint32_t i = 0; i < front->n_slots; i++) {
		struct worker_slot *slot = &front->slots[i];
		int fd;

		if (!is_ready(slot, model))
			continue;
		fd = worker_file(model);
		if (fd >= 0 &&
		    connection_request(&slot->process->control, PROTO_WORKER_RESTORE,
				       &(struct proto_empty){0}, fd, on_told, model, NULL) == 0)
			model->telling++;
		else
			model->untold = true;
	}
}

/* Whether it can be answered that all workers have what they are to, or that they have not. */
static bool is_told(struct model *model)
{
	if (model->untold)
		restore_all(model);
	model->n_tells = model->untold ? model->n_tells + 1 : 0;
	if (model->n_tells >= MOST_TELLS)
		return true;
	if (model->untold)
		uv_timer_start(&model->timer, tuned_on_timer, TELL_AGAIN_MS, 0);
	return !model->untold && model->telling == 0;
}

/* ---- waiters ---- */

static void waiter_free(struct waiter *waiter)
{
	list_remove(&waiter->in_model);
	free(waiter);
}

static void tuned_answer(struct waiter *waiter, bool stored)
{
	struct worker_slot *slot = waiter->slot;
	struct model *model = slot->tuned;
	struct fmha_error err;

	if (waiter->restored) {
		waiter->restored(slot, waiter->id,
				 model->loaded ? worker_file(model) : memfd_file("{}", 2));
	} else if (model->untold) {
		(void)fmha_error_set(&err, FMHA_ENOMEM,
				     "changed, but not all devices could be told yet");
		connection_answer_error(&slot->process->control, waiter->id, &err);
	} else {
		waiter->result.stored = stored;
		connection_answer(&slot->process->control, waiter->id, PROTO_REGISTRY_CHANGE,
				  &waiter->result, -1);
	}
	waiter_free(waiter);
}

static void answer_all(struct list *waiters, bool stored)
{
	struct list *node;

	while ((node = list_pop(waiters)))
		tuned_answer(container_of(node, struct waiter, in_model), stored);
}

static int add_waiter(struct model *model, struct worker_slot *slot, uint32_t id,
		      tuned_restored restored, struct waiter **ret_waiter, struct fmha_error *err)
{
	struct waiter *waiter = calloc(1, sizeof(*waiter));

	if (!waiter)
		return fmha_error_set(err, FMHA_ENOMEM, "tuned database: out of memory");
	waiter->slot = slot;
	waiter->id = id;
	waiter->restored = restored;
	list_append(&model->waiters, &waiter->in_model);
	*ret_waiter = waiter;
	return 0;
}

/* ---- writing ---- */

static void write_files(struct model *model)
{
	const struct proto_worker_ready_params *identity = tune_database_identity(model->database);
	struct tune_store *store = &model->tuned->store;
	char name[TUNE_NAME_BYTES];
	int r = 0;

	if (model->error.code != FMHA_OK)
		return; /* a text could not be made */
	if (model->settings_text) {
		tune_settings_file(identity, name);
		r = tune_store_write(store, name, model->settings_text, &model->error);
	}
	if (r == 0 && model->results_text) {
		tune_results_file(identity, name);
		(void)tune_store_write(store, name, model->results_text, &model->error);
	}
}

static void do_write(uv_work_t *work)
{
	struct model *model = container_of(work, struct model, work);

	write_files(model);
	atomic_store(&model->work_ended, true);
}

/* Says once that nothing is kept, and once that it is again. */
static void judge_write(struct model *model)
{
	const struct fmha_error *error = &model->error;

	if (error->code == FMHA_OK && *model->fault)
		log_notice("the tuned database is written again");
	else if (error->code != FMHA_OK && strcmp(model->fault, error->msg) != 0)
		log_warning("the tuned database is not written, going on from memory: %s",
			    error->msg);
	(void)snprintf(model->fault, sizeof(model->fault), "%s",
		       error->code == FMHA_OK ? "" : error->msg);
}

static void on_written(uv_work_t *work, int status)
{
	struct model *model = container_of(work, struct model, work);
	struct tuned *tuned = model->tuned;
	bool failed;

	(void)status;
	model->working = WORK_NONE;
	tuned->storing = false;
	judge_write(model);
	failed = model->error.code != FMHA_OK;
	model->results_dirty |= failed && model->results_text;
	model->settings_dirty |= failed && model->settings_text;
	free(model->results_text);
	free(model->settings_text);
	model->results_text = model->settings_text = NULL;
	answer_all(&model->written, !failed);
	if (tuned->store.was_anothers && tuned->store.fd >= 0) {
		log_notice(
			"the state directory is this daemon's now: what lies there is read again");
		list_for_each_entry(struct model, other, &tuned->models, in_tuned)
			other->stale = true;
	} else if (failed)
		uv_timer_start(&model->timer, tuned_on_timer, AGAIN_MS, 0);
	go_on(tuned);
}

/* Makes the texts of what is to be written. Without memory for one it stays to be written. */
static void take_dirty(struct model *model)
{
	bool results = model->results_dirty && model->results_kept;
	bool settings = model->settings_dirty && model->settings_kept;

	if (results)
		model->results_text = tune_database_results_text(model->database);
	if (settings)
		model->settings_text = tune_database_settings_text(model->database);
	model->results_dirty = results && !model->results_text;
	model->settings_dirty = settings && !model->settings_text;
	model->error.code = FMHA_OK;
	if (model->results_dirty || model->settings_dirty)
		(void)fmha_error_set(&model->error, FMHA_ENOMEM, "out of memory");
}

static void start_writing(struct model *model)
{
	struct list *node;

	take_dirty(model);
	while ((node = list_pop(&model->waiters)))
		list_append(&model->written, node);
	if (model->error.code == FMHA_OK && !model->results_text && !model->settings_text) {
		answer_all(&model->written, false); /* their file is not to be written over */
		return;
	}
	model->working = WORK_WRITING;
	model->tuned->storing = true;
	atomic_store(&model->work_ended, false);
	if (uv_queue_work(&model->tuned->front->loop, &model->work, do_write, on_written) < 0) {
		(void)fmha_error_set(&model->error, FMHA_ENOMEM, "no thread to write with");
		on_written(&model->work, 0);
	}
}

static void tuned_on_timer(uv_timer_t *timer)
{
	struct model *model = timer->data;

	if (model->working == WORK_LOADING) {
		log_warning("the tuned database is slow: a worker starts without it");
		answer_all(&model->waiters, false);
		return;
	}
	go_on(model->tuned);
}

static uint32_t n_times(const struct model *model)
{
	return tune_database_times(model->database)->n;
}

static void write_soon(struct model *model, bool now)
{
	uint64_t after_ms = SETTLE_MS + n_times(model) / 8;

	if (now)
		uv_timer_start(&model->timer, tuned_on_timer, 0, 0);
	else if (!uv_is_active((uv_handle_t *)&model->timer))
		uv_timer_start(&model->timer, tuned_on_timer, after_ms, 0);
}

/* ---- loading ---- */

static void do_load(uv_work_t *work)
{
	struct model *model = container_of(work, struct model, work);
	struct proto_worker_ready_params identity = model->key;

	if (!*identity.sources)
		builder_describe(model->tuned->front->builder, identity.device.arch,
				 identity.compiler, sizeof(identity.compiler), identity.sources,
				 sizeof(identity.sources));
	model->fresh = tune_database_new(&identity);
	if (model->fresh) {
		tune_database_set_catalog(model->fresh, model->tuned->catalog);
		tune_store_load(&model->tuned->store, model->fresh, &model->report);
	}
	atomic_store(&model->work_ended, true);
}

static void tuned_tell(const struct model *model)
{
	const struct tune_store_report *report = &model->report;

	if (*report->system)
		log_warning("the system's tuned database is left out: %s", report->system);
	if (*report->results)
		log_warning("the tuned database is left as it is and not used: %s",
			    report->results);
	if (*report->settings)
		log_warning("the kernel settings are left as they are and not used: %s",
			    report->settings);
	if (*tune_database_conflict(model->database))
		log_warning("%s had several priorities, under older names: the highest counts",
			    tune_database_conflict(model->database));
	if (*report->unwritable && !*report->results)
		log_warning("measured times and settings will not outlive this daemon: %s",
			    report->unwritable);
	log_info("%s: %u measured times, %zu files of other environments", model->key.model,
		 n_times(model), report->n_stale);
}

/* Of the slot's device, from what was kept. */
static void restore_quarantine(struct model *model, struct worker_slot *slot)
{
	const struct tune_quarantined *list;
	size_t n = tune_database_quarantine(model->database, &list);
	int64_t now_s = (int64_t)time(NULL);

	for (size_t i = 0; i < n; i++) {
		struct worker_quarantined what = {
			.code = list[i].code, .everybody = list[i].everybody, .uid = list[i].uid};

		if (list[i].until_s <= now_s)
			continue;
		memcpy(what.kernel, list[i].kernel, sizeof(what.kernel));
		what.until_ns = clock_ns() + (uint64_t)(list[i].until_s - now_s) * NS_PER_S;
		quarantine_restore(&slot->front->quarantine, slot->index, &what, clock_ns());
	}
	worker_process_show_quarantine(slot);
}

/* What was read takes the place of what was known. Times that were measured meanwhile are added; settings that were
 * answered as not stored are not. */
static void adopt(struct model *model)
{
	char *text = model->database ? tune_database_results_text(model->database) : NULL;
	uint64_t n_news = 0;
	struct fmha_error err;

	if (text && tune_database_merge(model->fresh, text, strlen(text), &n_news, &err) < 0)
		log_warning("measured times are forgotten: %s", err.msg);
	free(text);
	(void)tune_database_free(model->database);
	model->database = model->fresh;
	model->fresh = NULL;
	model->results_dirty = n_news > 0;
	model->settings_dirty = false;
}

static void on_loaded(uv_work_t *work, int status)
{
	struct model *model = container_of(work, struct model, work);
	struct tuned *tuned = model->tuned;
	struct front *front = tuned->front;

	(void)status;
	model->working = WORK_NONE;
	tuned->storing = false;
	uv_timer_stop(&model->timer);
	if (model->fresh)
		adopt(model);
	model->loaded = model->database;
	model->results_kept = model->report.results_readable;
	model->settings_kept = model->report.settings_readable;
	if (model->loaded) {
		tuned_tell(model);
		(void)snprintf(model->fault, sizeof(model->fault), "%s", model->report.unwritable);
		for (uint32_t i = 0; i < front->n_slots; i++)
			if (is_of(&front->slots[i], model))
				restore_quarantine(model, &front->slots[i]);
		restore_all(model); /* those that did not wait */
	}
	answer_all(&model->waiters, false);
	go_on(tuned);
}

static void start_loading(struct model *model)
{
	model->loaded = model->stale = false; /* changes wait, or are refused, meanwhile */
	model->working = WORK_LOADING;
	model->tuned->storing = true;
	atomic_store(&model->work_ended, false);
	if (uv_queue_work(&model->tuned->front->loop, &model->work, do_load, on_loaded) < 0)
		on_loaded(&model->work, 0);
}

/* One work at a time: what is due next. */
static void go_on(struct tuned *tuned)
{
	list_for_each_entry(struct model, model, &tuned->models, in_tuned) {
		if (tuned->storing)
			return;
		if (model->stale || (!model->loaded && !list_is_empty(&model->waiters)))
			start_loading(model);
		else if (model->loaded && (model->results_dirty || model->settings_dirty ||
					   model->untold || !list_is_empty(&model->waiters)))
			if (!uv_is_active((uv_handle_t *)&model->timer) && is_told(model))
				start_writing(model);
	}
}

/* ---- what workers ask ---- */

static struct model *get_model(struct tuned *tuned, const struct proto_worker_ready_params *params)
{
	struct model *model;

	list_for_each_entry(struct model, known, &tuned->models, in_tuned) {
		if (tune_is_same(&known->key, params))
			return known;
	}
	model = calloc(1, sizeof(*model));
	if (!model)
		return NULL;
	model->tuned = tuned;
	model->key = *params;
	list_init(&model->waiters);
	list_init(&model->written);
	uv_timer_init(&tuned->front->loop, &model->timer);
	model->timer.data = model;
	list_append(&tuned->models, &model->in_tuned);
	return model;
}

int tuned_attach(struct worker_slot *slot, uint32_t id,
		 const struct proto_worker_ready_params *params, tuned_restored restored,
		 struct fmha_error *err)
{
	struct tuned *tuned = slot->front->tuned;
	struct model *model = get_model(tuned, params);
	struct waiter *waiter = NULL;
	int r;

	if (!model)
		return fmha_error_set(err, FMHA_ENOMEM, "tuned database: out of memory");
	slot->tuned = model;
	r = add_waiter(model, slot, id, restored, &waiter, err);
	if (r < 0)
		return r;
	if (model->loaded) {
		tuned_answer(waiter, false);
		return 0;
	}
	uv_timer_start(&model->timer, tuned_on_timer, PATIENCE_MS, 0);
	if (!*params->sources)
		builder_open(tuned->front->builder);
	go_on(tuned);
	return 0;
}

static void forget_waiters(struct list *waiters, const struct worker_slot *slot)
{
	list_for_each_entry(struct waiter, waiter, waiters, in_model) {
		if (waiter->slot == slot)
			waiter_free(waiter);
	}
}

void tuned_detach(struct worker_slot *slot)
{
	struct model *model = slot->tuned;

	if (!model)
		return;
	forget_waiters(&model->waiters, slot);
	forget_waiters(&model->written, slot);
	slot->tuned = NULL;
}

static void pass_on(const struct model *model, const struct worker_slot *from,
		    const struct proto_measured *row)
{
	struct front *front = model->tuned->front;

	for (uint32_t i = 0; i < front->n_slots; i++) {
		struct worker_slot *slot = &front->slots[i];

		if (slot != from && is_ready(slot, model))
			(void)connection_request(&slot->process->control, PROTO_TUNED_RESULT, row,
						 -1, NULL, NULL, NULL);
	}
}

int tuned_add(struct worker_slot *slot, const struct proto_measured *row, struct fmha_error *err)
{
	struct model *model = slot->tuned;
	int r;

	if (!model || !model->loaded)
		return fmha_error_set(err, FMHA_EBUSY, "the tuned database is being read");
	r = times_add(tune_database_times(model->database), row, TIMES_OWN, NULL, err);
	if (r < 0)
		return r;
	model->results_dirty = true;
	pass_on(model, slot, row);
	write_soon(model, false);
	return 0;
}

static int lift(struct model *model, struct worker_slot *slot, const char *kernel, uint64_t *ret_n,
		struct fmha_error *err)
{
	struct front *front = slot->front;

	for (uint32_t i = 0; i < front->n_slots; i++)
		if (is_of(&front->slots[i], model)) {
			*ret_n += quarantine_lift(&front->quarantine, i, kernel);
			tuned_keep_quarantine(&front->slots[i]);
			worker_process_show_quarantine(&front->slots[i]);
		}
	if (*ret_n > 0)
		return 0;
	return fmha_error_set_field(err, FMHA_ENOENT, "kernel", "%.180s: is not in quarantine",
				    kernel);
}

static int apply(struct model *model, struct worker_slot *slot,
		 const struct proto_registry_change_params *params, const char *text, size_t size,
		 uint64_t *ret_n, struct fmha_error *err)
{
	struct tune_database *database = model->database;

	switch (params->change) {
	case PROTO_CHANGE_PRIORITY:
		return tune_database_set_priority(database, params->name, params->priority, err);
	case PROTO_CHANGE_LIFT:
		return lift(model, slot, params->name, ret_n, err);
	case PROTO_CHANGE_FORGET:
		*ret_n = times_forget(tune_database_times(database), params->name, params->shape);
		return 0;
	case PROTO_CHANGE_LOAD:
		return tune_database_load_set(database, params->name, text, size, err);
	case PROTO_CHANGE_UNLOAD:
		return tune_database_unload_set(database, params->name, err);
	case PROTO_CHANGE_MERGE:
		return tune_database_merge(database, text, size, ret_n, err);
	default:
		return fmha_error_refuse(err, "change", "unknown");
	}
}

static void log_change(const struct model *model, const struct proto_registry_change_params *params,
		       uint64_t n)
{
	static const char *const words[] = {"priority of", "lift",       "forget",
					    "load set",    "unload set", "merge"};

	log_notice("user %u, %s: %s %.200s%s%.160s (%d, %llu)", params->uid, model->key.model,
		   words[params->change], params->name, *params->shape ? " at " : "", params->shape,
		   params->priority, (unsigned long long)n);
}

int tuned_change(struct worker_slot *slot, uint32_t id,
		 const struct proto_registry_change_params *params, int fd, struct fmha_error *err)
{
	bool has_document = params->change == PROTO_CHANGE_LOAD ||
			    params->change == PROTO_CHANGE_MERGE;
	struct model *model = slot->tuned;
	struct waiter *waiter = NULL;
	char *text = NULL;
	size_t size = 0;
	uint64_t n = 0;
	int r = 0;

	if (!model || !model->loaded)
		return fmha_error_set(err, FMHA_EBUSY, "the tuned database is being read");
	if (has_document)
		r = memfd_read(fd, MOST_DOCUMENT, &text, &size, err);
	if (r == 0) /* first: a change whose end nobody could be told is not made */
		r = add_waiter(model, slot, id, NULL, &waiter, err);
	if (r == 0)
		r = apply(model, slot, params, text, size, &n, err);
	free(text);
	if (r != 0) {
		if (waiter)
			waiter_free(waiter);
		return r;
	}
	waiter->result.n_kernels = n;
	log_change(model, params, n);
	model->results_dirty |= params->change == PROTO_CHANGE_FORGET ||
				params->change == PROTO_CHANGE_MERGE;
	model->settings_dirty |= params->change != PROTO_CHANGE_FORGET;
	restore_all(model);
	write_soon(model, true);
	return 0;
}

static size_t add_quarantined(const struct worker_slot *slot, struct tune_quarantined *list,
			      size_t n)
{
	const struct quarantine *quarantine = &slot->front->quarantine;
	uint64_t now = clock_ns();

	for (uint32_t i = 0; i < QUARANTINE_ENTRIES && n < QUARANTINE_ENTRIES; i++) {
		const struct quarantine_entry *entry = &quarantine->entries[i];

		if (!quarantine_is_active(entry, now) || !entry->what.kernel[0] ||
		    entry->device != slot->index)
			continue;
		list[n] = (struct tune_quarantined){
			.code = entry->what.code,
			.everybody = entry->what.everybody,
			.uid = entry->what.uid,
			.until_s = (int64_t)time(NULL) +
				   (int64_t)((entry->what.until_ns - now) / NS_PER_S)};
		memcpy(list[n].kernel, entry->what.kernel, sizeof(list[n].kernel));
		n++;
	}
	return n;
}

void tuned_keep_quarantine(struct worker_slot *slot)
{
	struct tune_quarantined list[QUARANTINE_ENTRIES];
	struct model *model = slot->tuned;
	struct front *front = slot->front;
	size_t n = 0;

	if (!model || !model->loaded)
		return;
	for (uint32_t i = 0; i < front->n_slots; i++)
		if (is_of(&front->slots[i], model))
			n = add_quarantined(&front->slots[i], list, n);
	(void)tune_database_set_quarantine(model->database, list, n, NULL);
	model->settings_dirty = true;
	write_soon(model, true);
}

cJSON *tuned_status_json(const struct worker_slot *slot)
{
	const struct model *model = slot->tuned;
	cJSON *json = cJSON_CreateObject();

	if (!model || !model->loaded) {
		cJSON_AddStringToObject(json, "state", model ? "reading" : "none");
		return json;
	}
	cJSON_AddStringToObject(json, "state",
				*model->fault                                   ? "unwritable"
				: !model->results_kept || !model->settings_kept ? "unreadable"
										: "ok");
	cJSON_AddStringToObject(json, "reason",
				*model->fault            ? model->fault
				: *model->report.results ? model->report.results
							 : model->report.settings);
	cJSON_AddStringToObject(json, "directory", model->tuned->store.directory);
	cJSON_AddStringToObject(json, "model", model->key.model);
	cJSON_AddNumberToObject(json, "results", (double)n_times(model));
	cJSON_AddNumberToObject(json, "stale_files", (double)model->report.n_stale);
	return json;
}

/* ---- life ---- */

struct tuned *tuned_new(struct front *front)
{
	struct tuned *tuned = calloc(1, sizeof(*tuned));

	if (!tuned)
		return NULL;
	tuned->front = front;
	list_init(&tuned->models);
	if (spec_catalog_own(fmha_backends, &tuned->catalog, NULL) < 0) {
		free(tuned);
		return NULL;
	}
	tune_store_init(&tuned->store, front->config.tuning.state, front->config.tuning.system);
	return tuned;
}

static bool is_still_working(const struct tuned *tuned)
{
	list_for_each_entry(struct model, model, &tuned->models, in_tuned) {
		if (model->working != WORK_NONE && !atomic_load(&model->work_ended))
			return true;
	}
	return false;
}

struct tuned *tuned_free(struct tuned *tuned)
{
	if (!tuned)
		return NULL;
	for (int i = 0; i < LEAVE_MS && is_still_working(tuned); i++)
		(void)usleep(1000);
	if (is_still_working(tuned))
		return NULL; /* the process ends: its thread keeps what it uses */
	list_for_each_entry(struct model, model, &tuned->models, in_tuned) {
		if (!model->loaded || model->working != WORK_NONE)
			continue;
		take_dirty(model);
		write_files(model);
	}
	return NULL;
}
