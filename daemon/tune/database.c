/* SPDX-License-Identifier: MIT */
#include <tune/database.h>

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json/json.h>
#include <proto/clamp.h>
#include <proto/error.h>

struct tune_database {
	struct tune_identity identity;
	struct times times;
	cJSON *sets, *priorities; /* objects by name */
	struct tune_quarantined *quarantine;
	size_t n_quarantined;
};

/* ---- identity ---- */

/* FNV-1a; one text after the other. */
static uint64_t hash_text(uint64_t hash, const char *text)
{
	for (; *text; text++)
		hash = (hash ^ (uint8_t)*text) * 0x100000001b3;
	return (hash ^ 0xff) * 0x100000001b3;
}

static const uint64_t hash_start = 0xcbf29ce484222325;

void tune_environment(const struct tune_identity *identity, char *text, size_t n)
{
	(void)snprintf(text, n, "%s; %s; %.24s", identity->driver, identity->compiler,
		       identity->sources);
}

/* Lower case, digits, and a dash for everything between. */
static void slug_of(const char *model, char slug[64])
{
	size_t n = 0;

	for (; *model && n + 1 < 64; model++) {
		unsigned char c = (unsigned char)*model;

		if (isalnum(c))
			slug[n++] = (char)tolower(c);
		else if (n > 0 && slug[n - 1] != '-')
			slug[n++] = '-';
	}
	while (n > 0 && slug[n - 1] == '-')
		n--;
	slug[n] = '\0';
}

void tune_settings_file(const struct tune_identity *identity, char name[TUNE_NAME_BYTES])
{
	char slug[64];

	slug_of(identity->model, slug);
	(void)snprintf(name, TUNE_NAME_BYTES, "%s.settings.json", slug);
}

void tune_results_file(const struct tune_identity *identity, char name[TUNE_NAME_BYTES])
{
	uint64_t hash = hash_text(hash_start, identity->model);
	char slug[64];

	hash = hash_text(hash, identity->arch);
	hash = hash_text(hash, identity->driver);
	hash = hash_text(hash, identity->compiler);
	hash = hash_text(hash, identity->sources);
	slug_of(identity->model, slug);
	(void)snprintf(name, TUNE_NAME_BYTES, "%s-%016llx.json", slug, (unsigned long long)hash);
}

/* ---- life ---- */

static cJSON *default_sets(void)
{
	cJSON *sets = cJSON_CreateObject();
	cJSON *list = cJSON_AddArrayToObject(sets, "default"), *all = cJSON_CreateString("*");

	if (cJSON_AddItemToArray(list, all))
		return sets;
	cJSON_Delete(all);
	cJSON_Delete(sets);
	return NULL;
}

struct tune_database *tune_database_new(const struct tune_identity *identity)
{
	struct tune_database *database = calloc(1, sizeof(*database));

	if (!database)
		return NULL;
	database->identity = *identity;
	database->sets = default_sets();
	database->priorities = cJSON_CreateObject();
	if (database->sets && database->priorities)
		return database;
	return tune_database_free(database);
}

struct tune_database *tune_database_free(struct tune_database *database)
{
	if (!database)
		return NULL;
	times_clear(&database->times);
	cJSON_Delete(database->sets);
	cJSON_Delete(database->priorities);
	free(database->quarantine);
	free(database);
	return NULL;
}

const struct tune_identity *tune_database_identity(const struct tune_database *database)
{
	return &database->identity;
}

/* ---- results ---- */

size_t tune_database_n_results(const struct tune_database *database)
{
	return database->times.n;
}

int tune_database_add(struct tune_database *database, const struct proto_measured *row,
		      enum times_source source, struct fmha_error *err)
{
	return times_add(&database->times, row, source, NULL, err);
}

uint64_t tune_database_forget(struct tune_database *database, const char *pattern,
			      const char *shape)
{
	return times_forget(&database->times, pattern, shape);
}

/* ---- settings ---- */

int tune_database_set_priority(struct tune_database *database, const char *kernel, int32_t priority,
			       struct fmha_error *err)
{
	cJSON *known = cJSON_GetObjectItemCaseSensitive(database->priorities, kernel);

	if (known && priority != 0) {
		(void)cJSON_SetNumberValue(known, priority);
		return 0;
	}
	cJSON_DeleteItemFromObjectCaseSensitive(database->priorities, kernel);
	if (priority == 0)
		return 0;
	if (cJSON_GetArraySize(database->priorities) >= TUNE_MAX_PRIORITIES)
		return fmha_error_set(err, FMHA_EQUOTA, "%d kernels have a priority already",
				      TUNE_MAX_PRIORITIES);
	if (!cJSON_AddNumberToObject(database->priorities, kernel, priority))
		return fmha_error_set(err, FMHA_ENOMEM, "priority: out of memory");
	return 0;
}

static bool is_list_of_strings(const cJSON *list)
{
	const cJSON *item;

	if (!cJSON_IsArray(list))
		return false;
	cJSON_ArrayForEach(item, list)
	{
		if (!cJSON_IsString(item))
			return false;
	}
	return true;
}

int tune_database_load_set(struct tune_database *database, const char *name, const char *json,
			   size_t size, struct fmha_error *err)
{
	cJSON *list;

	if (json_from_text(json, size, NULL, &list) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "set: out of memory");
	if (!is_list_of_strings(list)) {
		cJSON_Delete(list);
		return fmha_error_set_field(err, FMHA_EINVAL, "set",
					    "set %.63s: not a JSON list of patterns", name);
	}
	cJSON_DeleteItemFromObjectCaseSensitive(database->sets, name);
	if (cJSON_GetArraySize(database->sets) >= TUNE_MAX_SETS) {
		cJSON_Delete(list);
		return fmha_error_set_field(err, FMHA_EQUOTA, "set", "%d sets are loaded already",
					    TUNE_MAX_SETS);
	}
	if (cJSON_AddItemToObject(database->sets, name, list))
		return 0;
	cJSON_Delete(list);
	return fmha_error_set(err, FMHA_ENOMEM, "set: out of memory");
}

int tune_database_unload_set(struct tune_database *database, const char *name,
			     struct fmha_error *err)
{
	if (!cJSON_GetObjectItemCaseSensitive(database->sets, name))
		return fmha_error_set_field(err, FMHA_ENOENT, "set", "set %.63s: not loaded", name);
	cJSON_DeleteItemFromObjectCaseSensitive(database->sets, name);
	return 0;
}

int tune_database_set_quarantine(struct tune_database *database,
				 const struct tune_quarantined *list, size_t n,
				 struct fmha_error *err)
{
	struct tune_quarantined *copy = calloc(n + 1, sizeof(*copy));

	if (!copy)
		return fmha_error_set(err, FMHA_ENOMEM, "quarantine: out of memory");
	if (n > 0)
		memcpy(copy, list, n * sizeof(*copy));
	free(database->quarantine);
	database->quarantine = copy;
	database->n_quarantined = n;
	return 0;
}

size_t tune_database_quarantine(const struct tune_database *database,
				const struct tune_quarantined **ret_list)
{
	*ret_list = database->quarantine;
	return database->n_quarantined;
}

/* ---- writing ---- */

static cJSON *begin(const char *format, const struct tune_database *database)
{
	cJSON *root;

	json_begin();
	root = cJSON_CreateObject();
	cJSON_AddStringToObject(root, "format", format);
	cJSON_AddNumberToObject(root, "version", 1);
	cJSON_AddStringToObject(root, "model", database->identity.model);
	return root;
}

char *tune_database_results_text(const struct tune_database *database)
{
	cJSON *root = begin("fmhad-tuned", database);

	cJSON_AddStringToObject(root, "arch", database->identity.arch);
	cJSON_AddStringToObject(root, "driver", database->identity.driver);
	cJSON_AddStringToObject(root, "compiler", database->identity.compiler);
	cJSON_AddStringToObject(root, "sources", database->identity.sources);
	times_write_all(root, &database->times, true);
	return json_end(root, false);
}

static void add_settings(cJSON *root, const struct tune_database *database)
{
	cJSON_AddItemToObject(root, "sets", cJSON_Duplicate(database->sets, 1));
	cJSON_AddItemToObject(root, "priorities", cJSON_Duplicate(database->priorities, 1));
}

char *tune_database_settings_text(const struct tune_database *database)
{
	cJSON *root = begin("fmhad-settings", database), *list;

	add_settings(root, database);
	list = cJSON_AddArrayToObject(root, "quarantine");
	for (size_t i = 0; i < database->n_quarantined; i++) {
		const struct tune_quarantined *entry = &database->quarantine[i];
		cJSON *item = cJSON_CreateObject();

		cJSON_AddStringToObject(item, "kernel", entry->kernel);
		json_add_hex(item, "code", entry->code);
		if (!entry->everybody)
			cJSON_AddNumberToObject(item, "uid", entry->uid);
		cJSON_AddNumberToObject(item, "until", (double)entry->until_s);
		cJSON_AddItemToArray(list, item);
	}
	return json_end(root, false);
}

char *tune_database_worker_text(const struct tune_database *database)
{
	char environment[256];
	cJSON *root;

	json_begin();
	root = cJSON_CreateObject();
	tune_environment(&database->identity, environment, sizeof(environment));
	cJSON_AddStringToObject(root, "environment", environment);
	add_settings(root, database);
	times_write_all(root, &database->times, false);
	return json_end(root, false);
}

/* ---- reading ---- */

static int refuse(struct fmha_error *err, const char *field, const char *why)
{
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: %s", field, why);
}

static int check_word(const cJSON *root, const char *field, const char *want,
		      struct fmha_error *err)
{
	const char *has = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(root, field));

	if (has && strcmp(has, want) == 0)
		return 0;
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: '%.60s', here it is '%.60s'",
				    field, has ? has : "", want);
}

/* The document, given, or NULL. */
static cJSON *parse(const struct tune_database *database, const char *text, size_t size,
		    const char *format, struct fmha_error *err)
{
	const char *rest = NULL;
	cJSON *root = NULL;
	const cJSON *version;
	int r = 0;

	if (size <= TUNE_MAX_BYTES && json_from_text(text, size, &rest, &root) < 0) {
		(void)fmha_error_set(err, FMHA_ENOMEM, "out of memory");
		return NULL;
	}
	for (; root && rest < text + size && r == 0; rest++)
		if (!isspace((unsigned char)*rest))
			r = refuse(err, "format", "something follows the document");
	if (r == 0 && !cJSON_IsObject(root))
		r = refuse(err, "format", "not a JSON object");
	if (r == 0)
		r = check_word(root, "format", format, err);
	version = cJSON_GetObjectItemCaseSensitive(root, "version");
	if (r == 0 && (!cJSON_IsNumber(version) || version->valuedouble != 1))
		r = refuse(err, "version", "not 1: of another fmhad");
	if (r == 0)
		r = check_word(root, "model", database->identity.model, err);
	if (r == 0)
		return root;
	cJSON_Delete(root);
	return NULL;
}

static int copy_string(const cJSON *item, const char *field, char *to, size_t n,
		       struct fmha_error *err)
{
	const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(item, field));

	if (!text || strlen(text) >= n)
		return refuse(err, field, "missing or too long");
	(void)snprintf(to, n, "%s", text);
	return 0;
}

static int read_number(const cJSON *item, const char *field, double *ret_value,
		       struct fmha_error *err)
{
	const cJSON *number = cJSON_GetObjectItemCaseSensitive(item, field);

	if (!cJSON_IsNumber(number) || !(number->valuedouble >= 0 && number->valuedouble < 1e15))
		return refuse(err, field, "not a number");
	*ret_value = number->valuedouble;
	return 0;
}

struct adding {
	struct tune_database *database;
	enum times_source source;
	uint64_t n_news;
};

static int add_one(void *owner, const struct proto_measured *row, struct fmha_error *err)
{
	struct adding *adding = owner;
	int r = tune_database_add(adding->database, row, adding->source, err);

	adding->n_news += r == 0;
	return r;
}

int tune_database_read_results(struct tune_database *database, const char *text, size_t size,
			       bool own, struct fmha_error *err)
{
	const struct tune_identity *identity = &database->identity;
	cJSON *root = parse(database, text, size, "fmhad-tuned", err);
	struct adding adding = {.database = database, .source = own ? TIMES_OWN : TIMES_SYSTEM};
	int r;

	if (!root)
		return err && err->code == FMHA_ENOMEM ? FMHA_ENOMEM : FMHA_EINVAL;
	r = check_word(root, "arch", identity->arch, err);
	if (r == 0)
		r = check_word(root, "driver", identity->driver, err);
	if (r == 0)
		r = check_word(root, "compiler", identity->compiler, err);
	if (r == 0)
		r = check_word(root, "sources", identity->sources, err);
	if (r == 0)
		r = times_read(cJSON_GetObjectItemCaseSensitive(root, "results"), NULL, add_one,
			       &adding, err);
	cJSON_Delete(root);
	return r;
}

int tune_database_merge(struct tune_database *database, const char *text, size_t size,
			uint64_t *ret_n, struct fmha_error *err)
{
	struct adding adding = {.database = database, .source = TIMES_IMPORTED};
	const cJSON *priorities, *item;
	cJSON *root;
	int r;

	if (json_from_text(text, size, NULL, &root) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "merge: out of memory");
	r = times_read(cJSON_GetObjectItemCaseSensitive(root, "results"), NULL, add_one, &adding,
		       err);
	priorities = cJSON_GetObjectItemCaseSensitive(root, "priorities");
	cJSON_ArrayForEach(item, priorities)
	{
		if (r == 0)
			r = tune_database_set_priority(database, item->string, item->valueint, err);
	}
	cJSON_Delete(root);
	if (r == 0)
		*ret_n = adding.n_news;
	return r;
}

static int check_settings(const cJSON *root, struct fmha_error *err)
{
	const cJSON *sets = cJSON_GetObjectItemCaseSensitive(root, "sets"), *item;
	const cJSON *priorities = cJSON_GetObjectItemCaseSensitive(root, "priorities");

	if (!cJSON_IsObject(sets) || cJSON_GetArraySize(sets) > TUNE_MAX_SETS)
		return refuse(err, "sets", "not an object of at most 16");
	cJSON_ArrayForEach(item, sets)
	{
		if (!is_list_of_strings(item))
			return refuse(err, "sets", "one is not a list of patterns");
	}
	if (!cJSON_IsObject(priorities) || cJSON_GetArraySize(priorities) > TUNE_MAX_PRIORITIES)
		return refuse(err, "priorities", "not an object of at most 4096");
	cJSON_ArrayForEach(item, priorities)
	{
		if (!cJSON_IsNumber(item))
			return refuse(err, "priorities", "one is not a number");
	}
	return 0;
}

static int read_quarantine(struct tune_database *database, const cJSON *list,
			   struct fmha_error *err)
{
	size_t n = (size_t)cJSON_GetArraySize(list), i = 0;
	struct tune_quarantined *entries = calloc(n + 1, sizeof(*entries));
	const cJSON *item;
	int r = entries ? 0 : fmha_error_set(err, FMHA_ENOMEM, "quarantine: out of memory");

	if (r == 0 && !cJSON_IsArray(list))
		r = refuse(err, "quarantine", "not a list");
	cJSON_ArrayForEach(item, list)
	{
		const cJSON *uid = cJSON_GetObjectItemCaseSensitive(item, "uid");
		double until = 0;

		if (r == 0)
			r = copy_string(item, "kernel", entries[i].kernel,
					sizeof(entries[i].kernel), err);
		if (r == 0)
			r = read_number(item, "until", &until, err);
		if (r < 0)
			break;
		entries[i].code = json_hex(item, "code");
		entries[i].everybody = !cJSON_IsNumber(uid);
		entries[i].uid = cJSON_IsNumber(uid) ? clamp_u32(uid->valuedouble) : 0;
		entries[i++].until_s = (int64_t)until;
	}
	if (r == 0)
		r = tune_database_set_quarantine(database, entries, n, err);
	free(entries);
	return r;
}

int tune_database_read_settings(struct tune_database *database, const char *text, size_t size,
				struct fmha_error *err)
{
	cJSON *root = parse(database, text, size, "fmhad-settings", err);
	int r;

	if (!root)
		return err && err->code == FMHA_ENOMEM ? FMHA_ENOMEM : FMHA_EINVAL;
	r = check_settings(root, err);
	if (r == 0)
		r = read_quarantine(database, cJSON_GetObjectItemCaseSensitive(root, "quarantine"),
				    err);
	if (r == 0) {
		cJSON_Delete(database->sets);
		cJSON_Delete(database->priorities);
		database->sets = cJSON_DetachItemFromObjectCaseSensitive(root, "sets");
		database->priorities = cJSON_DetachItemFromObjectCaseSensitive(root, "priorities");
	}
	cJSON_Delete(root);
	return r;
}
