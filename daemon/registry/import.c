/* SPDX-License-Identifier: MIT */
/*
 * import.c: what comes into a registry as a document.
 *
 * An export of another machine (exchange.c) lists every kernel of a device, up to millions, so it is never
 * parsed into one tree: a kernel at a time, twice, since all is judged before anything is merged.
 *
 * The state that outlives a worker comes from the front (tune/database.h), which has judged it; what does
 * not fit this build is skipped:
 *
 *   {"environment": "...", "sets": {"default": ["*"]}, "priorities": {"fwd-...": 3}, "results": [...]}
 */
#include "impl.h"

#include <stdio.h>
#include <string.h>

#include <json/json.h>
#include <proto/error.h>

/* ---- an export ---- */

struct import {
	struct registry *registry;
	bool has_times;
	bool gained; /* the kernel under way */
	uint64_t n_gained;
	struct fmha_error fault; /* the first; code FMHA_OK: none */
};

/* What is wrong with a kernel matters only if the document is this device's. */
static int judge_kernel(void *owner, const cJSON *item)
{
	struct import *import = owner;
	const cJSON *tuned = json_member(item, "tuned");
	const char *name = json_text(item, "name");
	struct fmha_error *fault = &import->fault;

	import->has_times |= cJSON_GetArraySize(tuned) > 0;
	if (fault->code != FMHA_OK)
		return 0;
	if (!cJSON_IsObject(item))
		(void)fmha_error_refuse(fault, "kernels", "one is not an object");
	else if (!*name)
		(void)fmha_error_refuse(fault, "kernels", "one has no name");
	else if (tuned)
		(void)times_read(tuned, name, NULL, NULL, fault);
	return 0;
}

static int merge_time(void *owner, const struct proto_measured *row, struct fmha_error *err)
{
	struct import *import = owner;
	int r = registry_set_tuned(import->registry, row, TIMES_IMPORTED, err);

	import->gained |= r == 0;
	return r;
}

/* Takes over what @item knows more than this registry. */
static int merge_kernel(void *owner, const cJSON *item)
{
	struct import *import = owner;
	const cJSON *priority = json_member(item, "priority"), *tuned = json_member(item, "tuned");
	const char *name = json_text(item, "name");
	struct registry_info info;
	int r = 0;

	if ((!cJSON_IsNumber(priority) && cJSON_GetArraySize(tuned) == 0) ||
	    registry_find(import->registry, name, NULL, &info, NULL) < 0)
		return 0; /* it says nothing, or is of a newer or older build */
	import->gained = cJSON_IsNumber(priority) && priority->valueint != 0 && info.priority == 0;
	if (import->gained)
		r = registry_set_priority(import->registry, name, priority->valueint,
					  &import->fault);
	if (r == 0 && tuned)
		r = times_read(tuned, name, merge_time, import, &import->fault);
	import->n_gained += import->gained;
	return r;
}

static int check_head(const struct registry *registry, const cJSON *root, struct fmha_error *err)
{
	const char *device = json_text(root, "device");
	const char *arch = cJSON_GetStringValue(cJSON_GetArrayItem(json_member(root, "archs"), 0));
	const cJSON *version = json_member(root, "version");

	if (strcmp(json_text(root, "format"), "fmhad-registry") != 0)
		return fmha_error_refuse(err, "format", "not an exported registry");
	if (!cJSON_IsNumber(version) || version->valuedouble != 1)
		return fmha_error_refuse(err, "version", "not 1");
	if (strcmp(device, registry->device) != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "device",
					    "device: exported from '%.100s', this is '%s'", device,
					    registry->device);
	if (!arch || strcmp(arch, registry_arch_name(registry, 0)) != 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "archs",
					    "archs: exported from '%.100s', this is '%s'",
					    arch ? arch : "", registry_arch_name(registry, 0));
	if (!cJSON_IsArray(json_member(root, "kernels")))
		return fmha_error_refuse(err, "kernels", "not a list");
	return 0;
}

static int import_judge(struct import *import, const char *json, size_t size,
			struct fmha_error *err)
{
	const char *environment = import->registry->environment;
	cJSON *root;
	int r = json_walk(json, size, "kernels", judge_kernel, import, &root);

	if (r > 0)
		r = fmha_error_refuse(err, "format", "not a JSON object");
	else if (r < 0)
		(void)fmha_error_set(err, r, "import: out of memory");
	if (r == 0)
		r = check_head(import->registry, root, err);
	if (r == 0 && import->has_times &&
	    (!*environment || strcmp(json_text(root, "environment"), environment) != 0))
		r = fmha_error_refuse(
			err, "environment",
			"measured with another driver, compiler or other kernel sources");
	if (r == 0 && import->fault.code != FMHA_OK) {
		*err = import->fault;
		r = err->code;
	}
	cJSON_Delete(root);
	return r;
}

int registry_import(struct registry *registry, const char *json, size_t size,
		    uint64_t *ret_n_merged, struct fmha_error *err)
{
	struct import import = {.registry = registry};
	cJSON *root;
	int r;

	if (size > REGISTRY_MAX_JSON)
		return fmha_error_refuse(err, "size", "larger than 512 MiB");
	r = import_judge(&import, json, size, err);
	if (r < 0)
		return r;
	r = json_walk(json, size, "kernels", merge_kernel, &import, &root);
	cJSON_Delete(root);
	if (r != 0)
		return fmha_error_set(err, FMHA_ENOMEM, "import: out of memory");
	if (ret_n_merged)
		*ret_n_merged = import.n_gained;
	return 0;
}

/* ---- the kept state ---- */

/* Those that are not among @sets. */
static void drop_sets(struct registry *registry, const cJSON *sets)
{
	pthread_mutex_lock(&registry->mutex);
	for (size_t i = registry->n_sets; i-- > 0;) {
		if (json_member(sets, registry->sets[i].name))
			continue;
		registry_set_deinit(&registry->sets[i]);
		registry->sets[i] = registry->sets[--registry->n_sets];
	}
	pthread_mutex_unlock(&registry->mutex);
}

/* Each replaces the one of its name, so that there is no moment without kernels. */
static int restore_sets(struct registry *registry, const cJSON *sets)
{
	const cJSON *set;
	int r = 0;

	if (!cJSON_IsObject(sets))
		return 0;
	drop_sets(registry, sets);
	cJSON_ArrayForEach(set, sets)
	{
		char *text = cJSON_PrintUnformatted(set);

		if (!text || registry_load_set(registry, set->string, text, strlen(text), NULL,
					       NULL) == FMHA_ENOMEM)
			r = FMHA_ENOMEM;
		cJSON_free(text);
	}
	return r;
}

static int restore_priorities(struct registry *registry, const cJSON *priorities)
{
	const cJSON *priority;
	int r = 0;

	cJSON_ArrayForEach(priority, priorities)
	{
		if (registry_set_priority(registry, priority->string, priority->valueint, NULL) ==
		    FMHA_ENOMEM)
			r = FMHA_ENOMEM;
	}
	return r;
}

static int restore_time(void *owner, const struct proto_measured *row, struct fmha_error *err)
{
	int r = registry_set_tuned(owner, row, TIMES_OWN, err);

	return r == FMHA_ENOMEM ? r : 0;
}

int registry_restore(struct registry *registry, const char *json, size_t size,
		     struct fmha_error *err)
{
	const char *environment;
	int r[3];
	cJSON *root;

	if (json_from_text(json, size, NULL, &root) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "the kept state: out of memory");
	if (!cJSON_IsObject(root)) {
		cJSON_Delete(root);
		return fmha_error_set(err, FMHA_EINVAL, "the kept state is not a JSON object");
	}
	environment = json_text(root, "environment");
	pthread_mutex_lock(&registry->mutex);
	if (*environment)
		(void)snprintf(registry->environment, sizeof(registry->environment), "%s",
			       environment);
	for (size_t i = 0; i < registry->table_size; i++)
		if (registry->table[i])
			registry->table[i]->priority = 0;
	registry_clear_results(registry);
	pthread_mutex_unlock(&registry->mutex);
	r[0] = restore_sets(registry, json_member(root, "sets"));
	r[1] = restore_priorities(registry, json_member(root, "priorities"));
	r[2] = times_read(json_member(root, "results"), NULL, restore_time, registry, NULL);
	cJSON_Delete(root);
	if (r[0] < 0 || r[1] < 0 || r[2] == FMHA_ENOMEM)
		return fmha_error_set(err, FMHA_ENOMEM, "the kept state: out of memory");
	return 0;
}
