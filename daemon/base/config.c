/* SPDX-License-Identifier: MIT */
/*
 * config.c: reading is strict, because a misspelt limit that is silently ignored is worse than a
 * daemon that says why it does not start.
 */
#include <base/config.h>

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include <proto/cleanup.h>
#include <proto/error.h>

#include <base/discover.h>
#include <base/log.h>

#include "config_keys.h"

struct reader {
	const char *name;
	struct config *config;
	struct fmha_error *err;
};

const struct config_device config_default_device = {
	.backend = "cpu", .stall_ms = 5000, .queue_depth = 2};

void config_init(struct config *config)
{
	*config = (struct config){.socket_mode = CONFIG_MODE_UNSET,
				  .log_level = LOG_LEVEL_INFO,
				  .supervision = {.heartbeat_ms = 1000,
						  .heartbeat_timeout_ms = 3000,
						  .start_timeout_ms = 30000,
						  .restart_ms = 100,
						  .quarantine_deaths = 3,
						  .quarantine_s = 600,
						  .drain_ms = 5000,
						  .status_ms = 500},
				  .compile = {.deadline_ms = 60000},
				  .tuning = {.automatic = 1,
					     .idle_s = 30,
					     .share = 25,
					     .launch_ms = 50,
					     .memory_bytes = UINT64_C(1) << 30},
				  .limits = {
#define LIMIT_DEFAULT(ID, key, when, value, least, most, help) [LIMIT_##ID] = (value),
					  LIMITS(LIMIT_DEFAULT)
#undef LIMIT_DEFAULT
				  }};
}

/* @item: what was found there; NULL: that is no help. */
static int complain(const struct reader *reader, const char *path, const cJSON *item,
		    const char *rule)
{
	_cleanup_(freep) char *found = cJSON_IsObject(item) || cJSON_IsArray(item)
					       ? NULL
					       : cJSON_PrintUnformatted(item);

	fmha_error_set_field(reader->err, FMHA_EINVAL, path, "%s: %s: %s%s%.40s", reader->name,
			     path, rule, found ? ", not " : "", found ? found : "");
	return FMHA_EINVAL;
}

static int read_number(const struct reader *reader, const char *path, const cJSON *item,
		       int64_t least, int64_t most, int64_t *ret_value)
{
	char rule[96];

	/* cJSON keeps doubles; every bound is below 2^53, so that the comparison is exact. */
	if (cJSON_IsNumber(item) && item->valuedouble >= (double)least &&
	    item->valuedouble <= (double)most && trunc(item->valuedouble) == item->valuedouble) {
		*ret_value = (int64_t)item->valuedouble;
		return 0;
	}
	snprintf(rule, sizeof(rule), "must be an integer from %lld to %lld", (long long)least,
		 (long long)most);
	return complain(reader, path, item, rule);
}

static int read_string(const struct reader *reader, const char *path, const cJSON *item,
		       const struct key *key, char *target)
{
	char rule[96];

	if (!cJSON_IsString(item) || strlen(item->valuestring) < (size_t)key->least ||
	    strlen(item->valuestring) >= (size_t)key->most) {
		snprintf(rule, sizeof(rule), "must be a string of %lld to %lld bytes",
			 (long long)key->least, (long long)key->most - 1);
		return complain(reader, path, item, rule);
	}
	strcpy(target, item->valuestring);
	return 0;
}

static int read_mode(const struct reader *reader, const char *path, const cJSON *item,
		     uint32_t *target)
{
	const char *text = cJSON_IsString(item) ? item->valuestring : "";
	size_t n = strlen(text);

	if (n < 3 || n > 4 || strspn(text, "01234567") != n || (n == 4 && text[0] != '0'))
		return complain(reader, path, item, "must be an octal string such as \"0660\"");
	*target = (uint32_t)strtoul(text, NULL, 8);
	return 0;
}

static int read_level(const struct reader *reader, const char *path, const cJSON *item,
		      uint32_t *target)
{
	for (uint32_t i = LOG_LEVEL_ERROR; i <= LOG_LEVEL_DEBUG; i++) {
		if (cJSON_IsString(item) && strcmp(item->valuestring, log_level_names[i]) == 0) {
			*target = i;
			return 0;
		}
	}
	return complain(reader, path, item, "must be error, warning, notice, info or debug");
}

static int read_uids(const struct reader *reader, const char *path, const cJSON *item,
		     const struct key *key)
{
	struct config *config = reader->config;
	const cJSON *uid;

	if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) > CONFIG_MAX_ADMINS)
		return complain(reader, path, item, "must be an array of at most 16 user ids");
	config->n_admins = 0;
	cJSON_ArrayForEach(uid, item)
	{
		int64_t value = 0;
		int r = read_number(reader, path, uid, key->least, key->most, &value);

		if (r < 0)
			return r;
		config->admin_uids[config->n_admins++] = (uint32_t)value;
	}
	return 0;
}

static int read_object(const struct reader *reader, const char *path, const cJSON *object,
		       const struct key *keys, void *target);

/* [{"uid": 1000, "weight": 4}, ...]: each user once, with both. */
static int read_priorities(const struct reader *reader, const char *path, const cJSON *item,
			   const struct key *key)
{
	struct config *config = reader->config;
	const cJSON *priority;

	if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) > CONFIG_MAX_PRIORITIES)
		return complain(reader, path, item, "must be an array of at most 64 objects");
	config->n_priorities = 0;
	cJSON_ArrayForEach(priority, item)
	{
		struct config_priority read = {.uid = (uint32_t)NO_UID};
		char element[64];
		int r;

		snprintf(element, sizeof(element), "%.32s[%u]", path, config->n_priorities);
		r = read_object(reader, element, priority, key->keys, &read);
		if (r < 0)
			return r;
		if (read.uid == NO_UID || read.weight == 0)
			return complain(reader, element, NULL, "must have a uid and a weight");
		for (uint32_t i = 0; i < config->n_priorities; i++)
			if (config->priorities[i].uid == read.uid)
				return complain(reader, element, NULL,
						"this user was given before");
		config->priorities[config->n_priorities++] = read;
	}
	return 0;
}

static bool is_backend(const char *name)
{
	static const char *const backends[] = {"cpu", "fake", "hip", "cuda"};

	for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
		if (strcmp(name, backends[i]) == 0)
			return true;
	return false;
}

static int read_devices(const struct reader *reader, const char *path, const cJSON *item,
			const struct key *key)
{
	struct config *config = reader->config;
	int n = cJSON_GetArraySize(item);
	const cJSON *device;

	if (!cJSON_IsArray(item) || n < 1 || n > PROTO_MAX_DEVICES)
		return complain(reader, path, item, "must be an array of 1 to 16 devices");
	config->n_devices = 0;
	cJSON_ArrayForEach(device, item)
	{
		struct config_device *target = &config->devices[config->n_devices];
		char element[64];
		int r;

		snprintf(element, sizeof(element), "%.32s[%u]", path, config->n_devices++);
		*target = config_default_device;
		r = read_object(reader, element, device, key->keys, target);
		if (r < 0)
			return r;
		if (!is_backend(target->backend)) {
			strncat(element, ".backend", sizeof(element) - strlen(element) - 1);
			return complain(reader, element,
					cJSON_GetObjectItemCaseSensitive(device, "backend"),
					"must be cpu, fake, hip or cuda");
		}
		if (target->allow_faults && strcmp(target->backend, "fake") != 0) {
			strncat(element, ".allow_faults", sizeof(element) - strlen(element) - 1);
			return complain(reader, element, NULL, "only the fake backend has faults");
		}
	}
	return 0;
}

static int read_key(const struct reader *reader, const char *path, const cJSON *item,
		    const struct key *key, void *target)
{
	void *field = (char *)target + key->offset;
	int64_t value;
	int r;

	switch (key->kind) {
	case KEY_U32:
	case KEY_U64:
		r = read_number(reader, path, item, key->least, key->most, &value);
		if (r < 0)
			return r;
		if (key->kind == KEY_U32)
			*(uint32_t *)field = (uint32_t)value;
		else
			*(uint64_t *)field = (uint64_t)value;
		return 0;
	case KEY_BOOL:
		if (!cJSON_IsBool(item))
			return complain(reader, path, item, "must be true or false");
		*(uint32_t *)field = cJSON_IsTrue(item);
		return 0;
	case KEY_STRING:
		return read_string(reader, path, item, key, field);
	case KEY_MODE:
		return read_mode(reader, path, item, field);
	case KEY_LEVEL:
		return read_level(reader, path, item, field);
	case KEY_UIDS:
		return read_uids(reader, path, item, key);
	case KEY_PRIORITIES:
		return read_priorities(reader, path, item, key);
	case KEY_OBJECT:
		return read_object(reader, path, item, key->keys, field);
	case KEY_DEVICES:
		return read_devices(reader, path, item, key);
	}
	return 0;
}

static int read_object(const struct reader *reader, const char *path, const cJSON *object,
		       const struct key *keys, void *target)
{
	const cJSON *item;

	if (!cJSON_IsObject(object))
		return complain(reader, *path ? path : "the document", object, "must be an object");
	cJSON_ArrayForEach(item, object)
	{
		const struct key *key = keys;
		char item_path[256];
		int r;

		snprintf(item_path, sizeof(item_path), "%s%s%.64s", path, *path ? "." : "",
			 item->string);
		while (key->name && strcmp(key->name, item->string) != 0)
			key++;
		if (!key->name)
			return complain(reader, item_path, NULL,
					"unknown key; `man fmhad.json` has them all");
		/* cJSON keeps both of two equal keys; people mean one of them. */
		for (const cJSON *other = item->next; other; other = other->next)
			if (strcmp(other->string, item->string) == 0)
				return complain(reader, item_path, NULL, "given twice");
		r = read_key(reader, item_path, item, key, target);
		if (r < 0)
			return r;
	}
	return 0;
}

static int syntax_error(const char *name, const char *text, size_t n, const char *where,
			struct fmha_error *err)
{
	unsigned int line = 1, column = 1;

	for (const char *p = text; where && p < where && p < text + n; p++) {
		column++;
		if (*p == '\n') {
			line++;
			column = 1;
		}
	}
	return fmha_error_set(err, FMHA_EINVAL, "%s:%u:%u: not valid JSON", name, line, column);
}

int config_parse(const char *name, const char *text, size_t n, struct config *config,
		 struct fmha_error *err)
{
	struct reader reader = {.name = name, .config = config, .err = err};
	const char *end = NULL;
	cJSON *root = cJSON_ParseWithLengthOpts(text, n, &end, 0);
	int r = 0;

	if (!root)
		return syntax_error(name, text, n, end, err);
	/* cJSON stops after the first value and is content. */
	for (; end < text + n && r == 0; end++)
		if (!strchr(" \t\r\n", *end) || *end == '\0')
			r = syntax_error(name, text, n, end, err);
	if (r == 0)
		r = read_object(&reader, "", root, config_keys, config);
	cJSON_Delete(root);
	return r;
}

/* A service's working directory is nobody's choice. */
static int check_paths(const char *name, const struct config *config, struct fmha_error *err)
{
	const struct {
		const char *key, *path;
	} paths[] = {{"socket", config->socket}, {"metrics_socket", config->metrics_socket}};

	for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++)
		if (paths[i].path[0] && paths[i].path[0] != '/')
			return fmha_error_set_field(err, FMHA_EINVAL, paths[i].key,
						    "%s: %s: \"%s\" does not begin with /", name,
						    paths[i].key, paths[i].path);
	return 0;
}

int config_load(const char *path, bool optional, struct config *config, struct fmha_error *err)
{
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	struct stat st;
	_cleanup_(freep) char *text = NULL;
	ssize_t n = 0;
	size_t size = 0;
	int r;

	if (fd < 0 && errno == ENOENT && optional)
		return 0;
	if (fd < 0 || fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", path, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return fmha_error_set(err, FMHA_EINVAL, "%s: not a regular file", path);
	text = malloc(CONFIG_MAX_BYTES + 1);
	if (!text)
		return fmha_error_set(err, FMHA_ENOMEM, "%s: out of memory", path);
	while (size <= CONFIG_MAX_BYTES &&
	       (n = read(fd, text + size, CONFIG_MAX_BYTES + 1 - size)) > 0)
		size += (size_t)n;
	if (n < 0)
		return fmha_error_set(err, FMHA_EIO, "%s: %s", path, strerror(errno));
	if (size > CONFIG_MAX_BYTES)
		return fmha_error_set(err, FMHA_EINVAL, "%s: more than 1 MiB", path);
	r = config_parse(path, text, size, config, err);
	return r == 0 ? check_paths(path, config, err) : r;
}

int config_resolve(struct config *config, struct fmha_error *err)
{
	const char *runtime = getenv("XDG_RUNTIME_DIR");
	const uint64_t *limits = config->limits;
	int n = 0;

	if (!config->socket[0]) {
		if (runtime && runtime[0] == '/' && geteuid() != 0)
			n = snprintf(config->socket, sizeof(config->socket), "%s/fmhad.sock",
				     runtime);
		else
			strcpy(config->socket, "/run/fmhad/fmhad.sock");
		if (n >= (int)sizeof(config->socket))
			return fmha_error_set_field(err, FMHA_EINVAL, "socket",
						    "$XDG_RUNTIME_DIR is too long for a socket");
	}
	/* The group of a process that was told of none is just its owner's, and may be everybody.
	 */
	if (config->socket_mode == CONFIG_MODE_UNSET)
		config->socket_mode = config->socket_group[0] ? 0660 : 0600;
	if (config->n_devices == 0) {
		config->devices[0] = config_default_device;
		config->n_devices = discover_gpus("/dev", "/sys", &config_default_device,
						  config->devices, 1, PROTO_MAX_DEVICES);
	}
	if (strcmp(config->metrics_socket, config->socket) == 0)
		return fmha_error_set_field(err, FMHA_EINVAL, "metrics_socket",
					    "metrics_socket %s: that is the clients' socket",
					    config->metrics_socket);
	if (limits[LIMIT_OUTPUT_SOFT_BYTES] > limits[LIMIT_OUTPUT_HARD_BYTES])
		return fmha_error_refuse(err, "limits.output_soft_bytes",
					 "more than output_hard_bytes");
	if (config->supervision.heartbeat_timeout_ms < config->supervision.heartbeat_ms)
		return fmha_error_refuse(err, "supervision.heartbeat_timeout_ms",
					 "less than heartbeat_ms");
	return 0;
}

int config_read(const struct config_source *source, struct config *config, struct fmha_error *err)
{
	int r;

	config_init(config);
	r = config_load(source->path ? source->path : CONFIG_DEFAULT_PATH, !source->path, config,
			err);
	if (r < 0)
		return r;
	if (source->socket)
		(void)snprintf(config->socket, sizeof(config->socket), "%s", source->socket);
	if (source->verbose)
		config->log_level = LOG_LEVEL_DEBUG;
	return config_resolve(config, err);
}

uint32_t config_weight(const struct config *config, uint32_t uid)
{
	for (uint32_t i = 0; i < config->n_priorities; i++)
		if (config->priorities[i].uid == uid)
			return config->priorities[i].weight;
	return 1;
}

bool config_is_privileged(const struct config *config, uint32_t uid)
{
	if (uid == 0 || uid == geteuid())
		return true;
	for (uint32_t i = 0; i < config->n_admins; i++)
		if (config->admin_uids[i] == uid)
			return true;
	return false;
}
