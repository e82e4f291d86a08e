/* SPDX-License-Identifier: MIT */
#include <tune/database.h>

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <json/json.h>
#include <proto/clamp.h>
#include <proto/error.h>
#include <proto/fnv.h>
#include <specs/backend.h>

struct tune_database {
	struct proto_worker_ready_params identity;
	const struct spec_catalog *catalog; /* NULL: names are taken as they are */
	struct times times;
	cJSON *settings; /* a document with "sets" and "priorities", objects by name */
	struct tune_quarantined *quarantine;
	size_t n_quarantined;
	char conflict[TUNE_KERNEL_BYTES];
};

/* ---- identity ---- */

/* What times hold for, as files name it. */
static const struct word {
	const char *name;
	size_t at;
} words[] = {
#define WORD(name, member)                                                                         \
	{                                                                                          \
		name, offsetof(struct proto_worker_ready_params, member)                           \
	}
	WORD("model", model),       WORD("arch", device.arch), WORD("driver", driver),
	WORD("compiler", compiler), WORD("sources", sources),
#undef WORD
};

#define N_WORDS (sizeof(words) / sizeof(words[0]))

static const char *word_of(const struct proto_worker_ready_params *identity, size_t i)
{
	return (const char *)identity + words[i].at;
}

bool tune_is_same(const struct proto_worker_ready_params *a,
		  const struct proto_worker_ready_params *b)
{
	for (size_t i = 0; i < N_WORDS; i++)
		if (strcmp(word_of(a, i), word_of(b, i)) != 0)
			return false;
	return true;
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

void tune_settings_file(const struct proto_worker_ready_params *identity,
			char name[TUNE_NAME_BYTES])
{
	char slug[64];

	slug_of(identity->model, slug);
	(void)snprintf(name, TUNE_NAME_BYTES, "%s.settings.json", slug);
}

void tune_results_file(const struct proto_worker_ready_params *identity, char name[TUNE_NAME_BYTES])
{
	uint64_t hash = FNV_START;
	char slug[64];

	for (size_t i = 0; i < N_WORDS; i++)
		hash = fnv_add(fnv_text(hash, word_of(identity, i)), 0xff);
	slug_of(identity->model, slug);
	(void)snprintf(name, TUNE_NAME_BYTES, "%s-%016llx.json", slug, (unsigned long long)hash);
}

/* ---- life ---- */

struct tune_database *tune_database_new(const struct proto_worker_ready_params *identity)
{
	struct tune_database *database = calloc(1, sizeof(*database));

	if (!database)
		return NULL;
	database->identity = *identity;
	database->settings = cJSON_Parse("{\"sets\": {\"default\": [\"*\"]}, \"priorities\": {}}");
	return database->settings ? database : tune_database_free(database);
}

void tune_database_set_catalog(struct tune_database *database, const struct spec_catalog *catalog)
{
	database->catalog = catalog;
}

/* What a kernel of this build is called now, or the name itself. */
static const char *own_name(const struct tune_database *database, const char *name,
			    char text[SPEC_NAME_BYTES])
{
	struct kernel_spec spec;

	if (!database->catalog || spec_name_parse(database->catalog, name, &spec, NULL) < 0)
		return name;
	spec_reduce(database->catalog, &spec);
	(void)spec_name_format(database->catalog, &spec, text);
	return text;
}

struct tune_database *tune_database_free(struct tune_database *database)
{
	if (!database)
		return NULL;
	times_clear(&database->times);
	cJSON_Delete(database->settings);
	free(database->quarantine);
	free(database);
	return NULL;
}

const struct proto_worker_ready_params *tune_database_identity(const struct tune_database *database)
{
	return &database->identity;
}

struct times *tune_database_times(struct tune_database *database)
{
	return &database->times;
}

/* ---- settings ---- */

/* Never NULL: what is read has both. */
static cJSON *setting(const struct tune_database *database, const char *name)
{
	return json_member(database->settings, name);
}

int tune_database_set_priority(struct tune_database *database, const char *kernel, int32_t priority,
			       struct fmha_error *err)
{
	cJSON *priorities = setting(database, "priorities");
	cJSON *known = json_member(priorities, kernel);

	if (priority == 0)
		cJSON_DeleteItemFromObjectCaseSensitive(priorities, kernel);
	else if (known)
		(void)cJSON_SetNumberValue(known, priority);
	else if (cJSON_GetArraySize(priorities) >= TUNE_MAX_PRIORITIES)
		return fmha_error_set(err, FMHA_EQUOTA, "%d kernels have a priority already",
				      TUNE_MAX_PRIORITIES);
	else if (!cJSON_AddNumberToObject(priorities, kernel, priority))
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
	cJSON *sets = setting(database, "sets"), *list;
	cJSON *known = json_member(sets, name);
	int r = 0;

	if (json_from_text(json, size, NULL, &list) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "set: out of memory");
	if (!is_list_of_strings(list))
		r = fmha_error_set_field(err, FMHA_EINVAL, "set",
					 "set %.63s: not a JSON list of patterns", name);
	else if (!known && cJSON_GetArraySize(sets) >= TUNE_MAX_SETS)
		r = fmha_error_set_field(err, FMHA_EQUOTA, "set", "%d sets are loaded already",
					 TUNE_MAX_SETS);
	else if (!cJSON_AddItemToObject(sets, name, list))
		r = fmha_error_set(err, FMHA_ENOMEM, "set: out of memory");
	if (r < 0)
		cJSON_Delete(list);
	else if (known)
		cJSON_Delete(cJSON_DetachItemViaPointer(sets, known));
	return r;
}

int tune_database_unload_set(struct tune_database *database, const char *name,
			     struct fmha_error *err)
{
	cJSON *set = cJSON_DetachItemFromObjectCaseSensitive(setting(database, "sets"), name);

	cJSON_Delete(set);
	return set ? 0
		   : fmha_error_set_field(err, FMHA_ENOENT, "set", "set %.63s: not loaded", name);
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

/* With the first words of the identity. */
static cJSON *database_begin(const char *format, const struct tune_database *database,
			     size_t n_words)
{
	cJSON *root;

	json_begin();
	root = cJSON_CreateObject();
	cJSON_AddStringToObject(root, "format", format);
	cJSON_AddNumberToObject(root, "version", 1);
	for (size_t i = 0; i < n_words; i++)
		cJSON_AddStringToObject(root, words[i].name, word_of(&database->identity, i));
	return root;
}

char *tune_database_results_text(const struct tune_database *database)
{
	cJSON *root = database_begin("fmhad-tuned", database, N_WORDS);

	times_write_all(root, &database->times, true);
	return json_end(root, false);
}

static void add_settings(cJSON *root, const struct tune_database *database)
{
	static const char *const names[] = {"sets", "priorities"};

	for (int i = 0; i < 2; i++)
		cJSON_AddItemToObject(root, names[i],
				      cJSON_Duplicate(setting(database, names[i]), 1));
}

char *tune_database_settings_text(const struct tune_database *database)
{
	cJSON *root = database_begin("fmhad-settings", database, 1), *list;

	add_settings(root, database);
	list = cJSON_AddArrayToObject(root, "quarantine");
	for (size_t i = 0; i < database->n_quarantined; i++) {
		const struct tune_quarantined *entry = &database->quarantine[i];
		cJSON *item = json_add_item(list);

		cJSON_AddStringToObject(item, "kernel", entry->kernel);
		json_add_hex(item, "code", entry->code);
		if (!entry->everybody)
			cJSON_AddNumberToObject(item, "uid", entry->uid);
		cJSON_AddNumberToObject(item, "until", (double)entry->until_s);
	}
	return json_end(root, false);
}

cJSON *tune_database_worker_json(const struct tune_database *database)
{
	const struct proto_worker_ready_params *identity = &database->identity;
	char environment[256]; /* driver, compiler and sources in one word */
	cJSON *root = cJSON_CreateObject();

	(void)snprintf(environment, sizeof(environment), "%s; %s; %.24s", identity->driver,
		       identity->compiler, identity->sources);
	cJSON_AddStringToObject(root, "environment", environment);
	add_settings(root, database);
	times_write_all(root, &database->times, false);
	return root;
}

/* ---- reading ---- */

static int check_word(const cJSON *root, const char *field, const char *want,
		      struct fmha_error *err)
{
	const char *has = json_text(root, field);

	if (strcmp(has, want) == 0)
		return 0;
	return fmha_error_set_field(err, FMHA_EINVAL, field, "%s: '%.60s', here it is '%.60s'",
				    field, has, want);
}

/* @ret_root: given on success. */
static int database_parse(const struct tune_database *database, const char *text, size_t size,
			  const char *format, size_t n_words, cJSON **ret_root,
			  struct fmha_error *err)
{
	const char *rest = NULL;
	cJSON *root = NULL;
	const cJSON *version;
	int r = 0;

	if (size <= TUNE_MAX_BYTES && json_from_text(text, size, &rest, &root) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	for (; root && rest < text + size && r == 0; rest++)
		if (!isspace((unsigned char)*rest))
			r = fmha_error_refuse(err, "format", "something follows the document");
	if (r == 0 && !cJSON_IsObject(root))
		r = fmha_error_refuse(err, "format", "not a JSON object");
	if (r == 0)
		r = check_word(root, "format", format, err);
	version = json_member(root, "version");
	if (r == 0 && (!cJSON_IsNumber(version) || version->valuedouble != 1))
		r = fmha_error_refuse(err, "version", "not 1: of another fmhad");
	for (size_t i = 0; i < n_words && r == 0; i++)
		r = check_word(root, words[i].name, word_of(&database->identity, i), err);
	if (r < 0)
		cJSON_Delete(root);
	else
		*ret_root = root;
	return r;
}

static int copy_string(const cJSON *item, const char *field, char *to, size_t n,
		       struct fmha_error *err)
{
	const char *text = cJSON_GetStringValue(json_member(item, field));

	if (!text || strlen(text) >= n)
		return fmha_error_refuse(err, field, "missing or too long");
	(void)snprintf(to, n, "%s", text);
	return 0;
}

static int read_number(const cJSON *item, const char *field, double *ret_value,
		       struct fmha_error *err)
{
	const cJSON *number = json_member(item, field);

	if (!cJSON_IsNumber(number) || !(number->valuedouble >= 0 && number->valuedouble < 1e15))
		return fmha_error_refuse(err, field, "not a number");
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
	enum times_source source = adding->source;
	struct proto_measured own = *row;
	char text[SPEC_NAME_BYTES];
	int r;

	(void)snprintf(own.kernel, sizeof(own.kernel), "%s",
		       own_name(adding->database, row->kernel, text));
	if (strcmp(own.kernel, row->kernel) != 0)
		source = TIMES_TWIN;
	r = times_add(&adding->database->times, &own, source, NULL, err);

	adding->n_news += r == 0;
	return r;
}

static int read_times(struct adding *adding, const cJSON *root, struct fmha_error *err)
{
	return times_read(json_member(root, "results"), NULL, add_one, adding, err);
}

int tune_database_read_results(struct tune_database *database, const char *text, size_t size,
			       bool own, struct fmha_error *err)
{
	struct adding adding = {database, own ? TIMES_OWN : TIMES_SYSTEM, 0};
	cJSON *root;
	int r = database_parse(database, text, size, "fmhad-tuned", N_WORDS, &root, err);

	if (r < 0)
		return r;
	r = read_times(&adding, root, err);
	cJSON_Delete(root);
	return r;
}

int tune_database_merge(struct tune_database *database, const char *text, size_t size,
			uint64_t *ret_n, struct fmha_error *err)
{
	struct adding adding = {database, TIMES_IMPORTED, 0};
	const cJSON *priorities, *item;
	cJSON *root;
	int r;

	if (json_from_text(text, size, NULL, &root) < 0)
		return fmha_error_set(err, FMHA_ENOMEM, "merge: out of memory");
	r = read_times(&adding, root, err);
	priorities = json_member(root, "priorities");
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
	const cJSON *sets = json_member(root, "sets"), *item;
	const cJSON *priorities = json_member(root, "priorities");

	if (!cJSON_IsObject(sets) || cJSON_GetArraySize(sets) > TUNE_MAX_SETS)
		return fmha_error_refuse(err, "sets", "not an object of at most 16");
	cJSON_ArrayForEach(item, sets)
	{
		if (!is_list_of_strings(item))
			return fmha_error_refuse(err, "sets", "one is not a list of patterns");
	}
	if (!cJSON_IsObject(priorities) || cJSON_GetArraySize(priorities) > TUNE_MAX_PRIORITIES)
		return fmha_error_refuse(err, "priorities", "not an object of at most 4096");
	cJSON_ArrayForEach(item, priorities)
	{
		if (!cJSON_IsNumber(item))
			return fmha_error_refuse(err, "priorities", "one is not a number");
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
		r = fmha_error_refuse(err, "quarantine", "not a list");
	cJSON_ArrayForEach(item, list)
	{
		const cJSON *uid = json_member(item, "uid");
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

/* Of several older names of one kernel the highest priority counts. */
static int rename_priorities(struct tune_database *database, cJSON *root, struct fmha_error *err)
{
	cJSON *old = cJSON_DetachItemFromObjectCaseSensitive(root, "priorities"), *item;
	cJSON *priorities = cJSON_AddObjectToObject(root, "priorities");
	bool lacks = !priorities;

	cJSON_ArrayForEach(item, old)
	{
		char text[SPEC_NAME_BYTES];
		const char *name = own_name(database, item->string, text);
		cJSON *known = json_member(priorities, name);

		if (!known)
			lacks |= !cJSON_AddNumberToObject(priorities, name, item->valuedouble);
		if (!known || known->valuedouble == item->valuedouble)
			continue;
		(void)snprintf(database->conflict, sizeof(database->conflict), "%s", name);
		if (item->valuedouble > known->valuedouble)
			(void)cJSON_SetNumberValue(known, item->valuedouble);
	}
	cJSON_Delete(old);
	return lacks ? fmha_error_set(err, FMHA_ENOMEM, "priorities: out of memory") : 0;
}

const char *tune_database_conflict(const struct tune_database *database)
{
	return database->conflict;
}

int tune_database_read_settings(struct tune_database *database, const char *text, size_t size,
				struct fmha_error *err)
{
	cJSON *root;
	int r = database_parse(database, text, size, "fmhad-settings", 1, &root, err);

	if (r < 0)
		return r;
	r = check_settings(root, err);
	if (r == 0)
		r = rename_priorities(database, root, err);
	if (r == 0)
		r = read_quarantine(database, json_member(root, "quarantine"), err);
	if (r == 0) {
		cJSON_DeleteItemFromObjectCaseSensitive(root, "quarantine");
		cJSON_Delete(database->settings);
		database->settings = root;
		root = NULL;
	}
	cJSON_Delete(root);
	return r;
}
