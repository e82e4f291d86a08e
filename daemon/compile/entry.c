/* SPDX-License-Identifier: MIT */
#include "entry.h"

#include <cjson/cJSON.h>
#include <nettle/sha2.h>
#include <stdbool.h>
#include <string.h>

#include "cleanup.h"

#define ENTRY_MAGIC    "FMHACO3\n" /* an older one is a miss */
#define MAX_INFO_BYTES 4096u
#define MAX_LOG_BYTES  (1u << 20)

/* Little-endian, as every machine this runs on. The digest covers all of the entry but itself. */
struct entry_header {
	char magic[8];
	uint32_t info_bytes;
	uint32_t log_bytes;
	uint64_t code_bytes;
	uint32_t uid; /* who asked for it first */
	uint32_t reserved[3];
	uint8_t key[CACHE_KEY_BYTES];
	uint8_t digest[SHA256_DIGEST_SIZE];
};
_Static_assert(sizeof(struct entry_header) == ENTRY_HEAD_BYTES, "a header is all header");

bool entry_owner(const uint8_t head[ENTRY_HEAD_BYTES], uint32_t *ret_uid)
{
	struct entry_header header;

	memcpy(&header, head, sizeof(header));
	if (memcmp(header.magic, ENTRY_MAGIC, sizeof(header.magic)) != 0)
		return false;
	*ret_uid = header.uid;
	return true;
}

static void entry_digest(const struct entry_header *header, const void *payload,
			 size_t payload_bytes, uint8_t ret_digest[SHA256_DIGEST_SIZE])
{
	struct sha256_ctx sha;

	sha256_init(&sha);
	sha256_update(&sha, offsetof(struct entry_header, digest), (const uint8_t *)header);
	sha256_update(&sha, payload_bytes, payload);
	sha256_digest(&sha, SHA256_DIGEST_SIZE, ret_digest);
}

/* The fields of struct compile_info, once for both directions. */
static const struct info_field {
	const char *name;
	size_t offset;
	size_t string_bytes; /* 0: a uint32_t */
} info_fields[] = {
#define INFO_STRING(name)                                                                          \
	{                                                                                          \
#name, offsetof(struct compile_info, name),                                        \
			sizeof(((struct compile_info *)0)->name)                                   \
	}
#define INFO_NUMBER(name)                                                                          \
	{                                                                                          \
#name, offsetof(struct compile_info, name), 0                                      \
	}
	INFO_STRING(kernel),           INFO_STRING(arch),
	INFO_STRING(compiler),         INFO_NUMBER(registers),
	INFO_NUMBER(scalar_registers), INFO_NUMBER(accumulators),
	INFO_NUMBER(spills),           INFO_NUMBER(scratch_bytes),
	INFO_NUMBER(lds_bytes),        INFO_NUMBER(occupancy),
	INFO_NUMBER(compile_ms),
#undef INFO_STRING
#undef INFO_NUMBER
};
#define N_INFO_FIELDS (sizeof(info_fields) / sizeof(info_fields[0]))

static char *info_print(const struct compile_info *info)
{
	cJSON *json = cJSON_CreateObject();
	bool ok = json != NULL;
	char *text = NULL;

	for (size_t i = 0; ok && i < N_INFO_FIELDS; i++) {
		const char *at = (const char *)info + info_fields[i].offset;

		if (info_fields[i].string_bytes)
			ok = cJSON_AddStringToObject(json, info_fields[i].name, at);
		else
			ok = cJSON_AddNumberToObject(json, info_fields[i].name,
						     *(const uint32_t *)(const void *)at);
	}
	if (ok)
		text = cJSON_PrintUnformatted(json);
	cJSON_Delete(json);
	return text;
}

static bool info_parse(const char *text, size_t size, struct compile_info *info)
{
	cJSON *json = cJSON_ParseWithLength(text, size);
	bool ok = cJSON_IsObject(json);

	for (size_t i = 0; ok && i < N_INFO_FIELDS; i++) {
		const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, info_fields[i].name);
		char *at = (char *)info + info_fields[i].offset;

		if (info_fields[i].string_bytes) {
			ok = cJSON_IsString(item) &&
			     strlen(item->valuestring) < info_fields[i].string_bytes;
			if (ok)
				(void)strcpy(at, item->valuestring);
		} else {
			ok = cJSON_IsNumber(item) && item->valuedouble >= 0 &&
			     item->valuedouble <= UINT32_MAX;
			if (ok)
				*(uint32_t *)(void *)at = (uint32_t)item->valuedouble;
		}
	}
	cJSON_Delete(json);
	return ok;
}

int entry_parse(const void *data, size_t size, const struct cache_key *key,
		struct cache_entry **ret_entry)
{
	const char *payload = (const char *)data + sizeof(struct entry_header);
	_cleanup_(cache_entry_freep) struct cache_entry *entry = NULL;
	uint8_t digest[SHA256_DIGEST_SIZE];
	struct entry_header header;

	if (size < sizeof(header) || size > CACHE_MAX_ENTRY_BYTES)
		return CACHE_MISS;
	memcpy(&header, data, sizeof(header));
	if (memcmp(header.magic, ENTRY_MAGIC, sizeof(header.magic)) != 0 ||
	    memcmp(header.key, key->bytes, CACHE_KEY_BYTES) != 0)
		return CACHE_MISS;
	if (header.info_bytes > MAX_INFO_BYTES || header.log_bytes > MAX_LOG_BYTES ||
	    header.code_bytes > CACHE_MAX_ENTRY_BYTES ||
	    sizeof(header) + header.info_bytes + header.log_bytes + header.code_bytes != size)
		return CACHE_MISS;
	entry_digest(&header, payload, size - sizeof(header), digest);
	if (memcmp(digest, header.digest, sizeof(digest)) != 0)
		return CACHE_MISS;

	entry = calloc(1, sizeof(*entry));
	if (!entry)
		return CACHE_MISS;
	entry->log = malloc((size_t)header.log_bytes + 1);
	entry->code = malloc(header.code_bytes ? header.code_bytes : 1);
	if (!entry->log || !entry->code || !info_parse(payload, header.info_bytes, &entry->info))
		return CACHE_MISS;
	memcpy(entry->log, payload + header.info_bytes, header.log_bytes);
	entry->log[header.log_bytes] = '\0';
	memcpy(entry->code, payload + header.info_bytes + header.log_bytes, header.code_bytes);
	entry->code_bytes = header.code_bytes;
	entry->uid = header.uid;

	*ret_entry = entry;
	entry = NULL;
	return 0;
}

void *entry_print(const struct cache_key *key, const struct cache_entry *entry, size_t *ret_size)
{
	_cleanup_(freep) char *info = info_print(&entry->info);
	size_t log_bytes = entry->log ? strnlen(entry->log, MAX_LOG_BYTES) : 0;
	struct entry_header header = {.log_bytes = (uint32_t)log_bytes,
				      .code_bytes = entry->code_bytes,
				      .uid = entry->uid};
	char *data, *payload;
	size_t size;

	if (!info)
		return NULL;
	header.info_bytes = (uint32_t)strlen(info);
	memcpy(header.magic, ENTRY_MAGIC, sizeof(header.magic));
	memcpy(header.key, key->bytes, CACHE_KEY_BYTES);
	size = sizeof(header) + header.info_bytes + log_bytes + entry->code_bytes;
	data = malloc(size);
	if (!data)
		return NULL;
	payload = data + sizeof(header);
	memcpy(payload, info, header.info_bytes);
	memcpy(payload + header.info_bytes, entry->log ? entry->log : "", log_bytes);
	memcpy(payload + header.info_bytes + log_bytes, entry->code, entry->code_bytes);
	entry_digest(&header, payload, size - sizeof(header), header.digest);
	memcpy(data, &header, sizeof(header));
	*ret_size = size;
	return data;
}

struct cache_entry *cache_entry_free(struct cache_entry *entry)
{
	if (!entry)
		return NULL;
	free(entry->log);
	free(entry->code);
	free(entry);
	return NULL;
}
