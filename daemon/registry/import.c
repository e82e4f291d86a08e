/* SPDX-License-Identifier: MIT */
/*
 * import.c: merging an export of another machine.
 *
 * An export lists every kernel of a device, up to millions, so it is never parsed into one tree:
 * the document is cut into the values of its members and the list into its elements, by counting
 * brackets outside strings, and each piece that matters is parsed on its own. All is judged before
 * anything is merged.
 */
#include "impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json/json.h>
#include <proto/clamp.h>
#include <proto/error.h>

/* A piece of the document. */
struct slice {
	const char *at, *end;
};

static int refuse(struct fmha_error *err, const char *field, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: %s", field, why);
}

static const char *skip_space(const char *p, const char *end)
{
	while (p < end && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t'))
		p++;
	return p;
}

/* @p is behind the opening quote. Returns what follows the closing one, or NULL. */
static const char *skip_string(const char *p, const char *end)
{
	for (; p < end; p++) {
		if (*p == '\\')
			p++;
		else if (*p == '"')
			return p + 1;
	}
	return NULL;
}

/* What follows the value at @p, or NULL when there is none. Only its extent is found here. */
static const char *skip_value(const char *p, const char *end)
{
	size_t depth = 0;

	do {
		p = skip_space(p, end);
		if (p == end)
			return NULL;
		if (*p == '"') {
			p = skip_string(p + 1, end);
			if (!p)
				return NULL;
		} else if (*p == '{' || *p == '[') {
			depth++;
			p++;
		} else if (*p == '}' || *p == ']') {
			if (depth-- == 0)
				return NULL;
			p++;
		} else if (depth > 0) {
			p++; /* a comma, a colon, part of a word */
		} else {
			const char *from = p;

			while (p < end && !strchr(",]} \n\r\t", *p))
				p++;
			return p > from ? p : NULL;
		}
	} while (depth > 0);
	return p;
}

/* The next element of a list; 1, 0 at the end, negative: not a list. Starts with *@p at the
 * bracket. */
static int next_element(const char **p, const char *end, struct slice *ret_element)
{
	const char *at = skip_space(*p, end);

	if (at == end || (*at != '[' && *at != ',' && *at != ']'))
		return -1;
	if (*at == ']')
		return 0;
	if (*at == '[' && *skip_space(at + 1, end) == ']')
		return 0;
	ret_element->at = skip_space(at + 1, end);
	ret_element->end = skip_value(ret_element->at, end);
	if (!ret_element->end)
		return -1;
	*p = ret_element->end;
	return 1;
}

static cJSON *parse(const struct slice *slice)
{
	cJSON *item;

	(void)json_from_text(slice->at, (size_t)(slice->end - slice->at), NULL, &item);
	return item; /* NULL also without memory: see registry_import() */
}

struct document {
	struct slice format, version, device, environment, archs, kernels;
};

static struct slice *member_of(struct document *d, const struct slice *key)
{
	static const char *const names[] = {"\"format\"",      "\"version\"", "\"device\"",
					    "\"environment\"", "\"archs\"",   "\"kernels\""};
	struct slice *members[] = {&d->format,      &d->version, &d->device,
				   &d->environment, &d->archs,   &d->kernels};
	size_t n = (size_t)(key->end - key->at);

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (strlen(names[i]) == n && memcmp(names[i], key->at, n) == 0)
			return members[i];
	return NULL;
}

/* Cuts the document; false: not an object. */
static bool cut(const char *p, const char *end, struct document *d)
{
	p = skip_space(p, end);
	if (p == end || *p != '{')
		return false;
	p = skip_space(p + 1, end);
	while (p < end && *p == '"') {
		struct slice key = {p, skip_string(p + 1, end)}, value, *member;

		p = key.end ? skip_space(key.end, end) : NULL;
		if (!p || p == end || *p != ':')
			return false;
		value.at = skip_space(p + 1, end);
		value.end = skip_value(value.at, end);
		if (!value.end)
			return false;
		member = member_of(d, &key);
		if (member)
			*member = value;
		p = skip_space(value.end, end);
		if (p < end && *p == ',')
			p = skip_space(p + 1, end);
	}
	return p < end && *p == '}' && skip_space(p + 1, end) == end;
}

/* Does @slice hold exactly the string @want? *@ret_has: for the message. */
static bool is_string(const struct slice *slice, const char *want,
		      char ret_has[REGISTRY_ENVIRONMENT_BYTES])
{
	cJSON *item = slice->at ? parse(slice) : NULL;
	const char *has = item && cJSON_IsString(item) ? item->valuestring : "";
	bool same = strcmp(has, want) == 0;

	(void)snprintf(ret_has, REGISTRY_ENVIRONMENT_BYTES, "%s", has);
	cJSON_Delete(item);
	return same;
}

static int check_head(const struct registry *registry, const struct document *d,
		      struct fmha_error *err)
{
	const char *arch = registry_arch_name(registry, 0), *p = d->archs.at;
	struct slice first = {0};
	cJSON *version;
	char has[REGISTRY_ENVIRONMENT_BYTES];
	bool sound;

	if (!is_string(&d->format, "fmhad-registry", has))
		return refuse(err, "format", "not an exported registry");
	version = d->version.at ? parse(&d->version) : NULL;
	sound = version && cJSON_IsNumber(version) && version->valuedouble == 1;
	cJSON_Delete(version);
	if (!sound)
		return refuse(err, "version", "not 1");
	if (!is_string(&d->device, registry->device, has))
		return fmha_error_set_field(err, FMHA_EINVAL, "device",
					    "device: exported from '%s', this is '%s'", has,
					    registry->device);
	if (!p || next_element(&p, d->archs.end, &first) != 1 || !is_string(&first, arch, has))
		return fmha_error_set_field(err, FMHA_EINVAL, "archs",
					    "archs: exported from '%s', this is '%s'",
					    first.at ? has : "", arch);
	return 0;
}

/* Return: 0 and the result of a kernel's list, or FMHA_EINVAL naming the field. */
static int read_result(const cJSON *item, struct registry_result *ret_result,
		       struct fmha_error *err)
{
	const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
	const cJSON *us = cJSON_GetObjectItemCaseSensitive(item, "us");
	const cJSON *splits = cJSON_GetObjectItemCaseSensitive(item, "splits");
	const cJSON *when = cJSON_GetObjectItemCaseSensitive(item, "when");

	if (!cJSON_IsString(shape) || strlen(shape->valuestring) >= REGISTRY_SHAPE_BYTES)
		return refuse(err, "shape", "missing or too long");
	if (!cJSON_IsNumber(us) || !(us->valuedouble > 0) || !(us->valuedouble < REGISTRY_MAX_US))
		return refuse(err, "us", "not a duration");
	if (splits && (!cJSON_IsNumber(splits) || splits->valueint < 0))
		return refuse(err, "splits", "not a number of splits");
	*ret_result = (struct registry_result){
		.n_splits = splits ? splits->valueint : 0,
		.us = us->valuedouble,
		.when_s = cJSON_IsNumber(when) ? clamp_i64(when->valuedouble) : 0};
	(void)snprintf(ret_result->shape, sizeof(ret_result->shape), "%s", shape->valuestring);
	return 0;
}

/* @foreign: of another environment, or of an unknown one. */
static int check_kernel(const cJSON *item, bool foreign, struct fmha_error *err)
{
	const cJSON *tuned = cJSON_GetObjectItemCaseSensitive(item, "tuned"), *element;
	struct registry_result result;
	int r = 0;

	if (!cJSON_IsString(cJSON_GetObjectItemCaseSensitive(item, "name")))
		return refuse(err, "kernels", "one has no name");
	if (tuned && !cJSON_IsArray(tuned))
		return refuse(err, "tuned", "not a list");
	if (foreign && cJSON_GetArraySize(tuned) > 0)
		return refuse(err, "environment",
			      "measured with another driver, compiler or other kernel sources");
	cJSON_ArrayForEach(element, tuned)
	{
		r = r < 0 ? r : read_result(element, &result, err);
	}
	return r;
}

/* The same, or a newer one. */
static bool is_known(const struct registry_entry *entry, const struct registry_result *result)
{
	for (uint32_t i = 0; i < entry->n_tuned; i++)
		if (entry->tuned[i].n_splits == result->n_splits &&
		    entry->tuned[i].when_s >= result->when_s &&
		    strcmp(entry->tuned[i].shape->key, result->shape) == 0)
			return true;
	return false;
}

/* Takes over what @item knows more than this registry; 1 when that was something. */
static int merge_kernel(struct registry *registry, const cJSON *item, struct fmha_error *err)
{
	const cJSON *name = cJSON_GetObjectItemCaseSensitive(item, "name");
	const cJSON *priority = cJSON_GetObjectItemCaseSensitive(item, "priority");
	const cJSON *tuned = cJSON_GetObjectItemCaseSensitive(item, "tuned"), *element;
	struct registry_result result;
	struct registry_entry *entry;
	struct kernel_spec spec;
	int gained = 0;

	if (!cJSON_IsNumber(priority) && cJSON_GetArraySize(tuned) == 0)
		return 0;
	if (registry_find(registry, name->valuestring, &spec, NULL, NULL) < 0)
		return 0; /* of a newer or older build */
	pthread_mutex_lock(&registry->mutex);
	entry = registry_entry_find(registry, &spec, true);
	if (!entry) {
		pthread_mutex_unlock(&registry->mutex);
		return fmha_error_set(err, FMHA_ENOMEM, "import: out of memory");
	}
	if (cJSON_IsNumber(priority) && entry->priority == 0 && priority->valueint != 0) {
		entry->priority = priority->valueint;
		registry->generation++;
		gained = 1;
	}
	cJSON_ArrayForEach(element, tuned)
	{
		if (read_result(element, &result, NULL) == 0 && !is_known(entry, &result) &&
		    registry_entry_set_tuned(registry, entry, &result, NULL) == 0)
			gained = 1;
	}
	pthread_mutex_unlock(&registry->mutex);
	return gained;
}

/* Goes through the list, judging (@registry NULL) or merging. */
static int walk(struct registry *registry, const struct slice *kernels, bool foreign,
		uint64_t *n_merged, struct fmha_error *err)
{
	const char *p = kernels->at;
	struct slice element;
	int r;

	while ((r = next_element(&p, kernels->end, &element)) > 0) {
		cJSON *item = parse(&element);

		if (!cJSON_IsObject(item))
			r = refuse(err, "kernels", "one is not an object");
		else
			r = registry ? merge_kernel(registry, item, err)
				     : check_kernel(item, foreign, err);
		cJSON_Delete(item);
		if (r < 0)
			return r;
		*n_merged += r > 0;
	}
	return r < 0 ? refuse(err, "kernels", "not a list") : 0;
}

static int import(struct registry *registry, const char *json, size_t size, uint64_t *ret_n_merged,
		  struct fmha_error *err)
{
	char has[REGISTRY_ENVIRONMENT_BYTES];
	struct document d = {0};
	uint64_t n_merged = 0;
	bool foreign;
	int r;

	if (size > REGISTRY_MAX_JSON)
		return refuse(err, "size", "larger than 512 MiB");
	if (!cut(json, json + size, &d))
		return refuse(err, "format", "not a JSON object");
	r = check_head(registry, &d, err);
	if (r == 0 && !d.kernels.at)
		r = refuse(err, "kernels", "not a list");
	foreign = !*registry->environment || !is_string(&d.environment, registry->environment, has);
	if (r == 0)
		r = walk(NULL, &d.kernels, foreign, &n_merged, err);
	if (r == 0)
		r = walk(registry, &d.kernels, foreign, &n_merged, err);
	if (r < 0)
		return r;
	if (ret_n_merged)
		*ret_n_merged = n_merged;
	return 0;
}

int registry_import(struct registry *registry, const char *json, size_t size,
		    uint64_t *ret_n_merged, struct fmha_error *err)
{
	int r;

	(void)json_lacked_memory(); /* before */
	r = import(registry, json, size, ret_n_merged, err);
	/* A refusal follows at once from the value that could not be read. */
	if (r == FMHA_EINVAL && json_lacked_memory())
		return fmha_error_set(err, FMHA_ENOMEM, "import: out of memory");
	return r;
}
