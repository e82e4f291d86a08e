/* SPDX-License-Identifier: MIT */
#include "directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include <compile/cache.h>
#include <files/files.h>
#include <nettle/sha2.h>
#include <proto/error.h>

#include "cleanup.h"

/* ---- cache key ---- */

struct cache_key cache_key_of(const struct cache_key_part *parts, size_t n_parts)
{
	struct sha256_ctx sha;
	struct cache_key key;

	sha256_init(&sha);
	for (size_t i = 0; i < n_parts; i++) {
		uint64_t size = parts[i].size;

		sha256_update(&sha, sizeof(size), (const uint8_t *)&size);
		sha256_update(&sha, parts[i].size, parts[i].data);
	}
	sha256_digest(&sha, sizeof(key.bytes), key.bytes);
	return key;
}

void cache_key_hex(const struct cache_key *key, char ret_hex[CACHE_HEX_BYTES])
{
	for (size_t i = 0; i < CACHE_KEY_BYTES; i++)
		(void)snprintf(ret_hex + 2 * i, 3, "%02x", key->bytes[i]);
}

/* ---- entry ---- */

#define ENTRY_MAGIC   "FMHACO4\n" /* an older one is a miss */
#define MAX_LOG_BYTES (1u << 20)

/* Little-endian, as every machine this runs on; after it a struct compile_info, log and code. The digest covers all of the
 * entry but itself. */
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

/* Who asked for the entry whose file begins with these bytes. Return: false: not an entry. */
static bool entry_owner(const uint8_t head[ENTRY_HEAD_BYTES], uint32_t *ret_uid)
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

_Static_assert(sizeof(struct compile_info) == 256 + 32 + 96 + 8 * sizeof(uint32_t),
	       "it lies in files as it is: what changes it changes ENTRY_MAGIC, too");

static bool is_text(const char *text, size_t size)
{
	return memchr(text, '\0', size);
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
	if (header.info_bytes != sizeof(struct compile_info) || header.log_bytes > MAX_LOG_BYTES ||
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
	if (!entry->log || !entry->code)
		return CACHE_MISS;
	memcpy(&entry->info, payload, sizeof(entry->info));
	if (!is_text(entry->info.kernel, sizeof(entry->info.kernel)) ||
	    !is_text(entry->info.arch, sizeof(entry->info.arch)) ||
	    !is_text(entry->info.compiler, sizeof(entry->info.compiler)))
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
	size_t log_bytes = entry->log ? strnlen(entry->log, MAX_LOG_BYTES) : 0;
	struct entry_header header = {.info_bytes = sizeof(entry->info),
				      .log_bytes = (uint32_t)log_bytes,
				      .code_bytes = entry->code_bytes,
				      .uid = entry->uid};
	char *data, *payload;
	size_t size;

	memcpy(header.magic, ENTRY_MAGIC, sizeof(header.magic));
	memcpy(header.key, key->bytes, CACHE_KEY_BYTES);
	size = sizeof(header) + header.info_bytes + log_bytes + entry->code_bytes;
	data = malloc(size);
	if (!data)
		return NULL;
	payload = data + sizeof(header);
	memcpy(payload, &entry->info, sizeof(entry->info));
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

/* ---- ledger ---- */

#define LEAST_CAPACITY 64
#define SPARE          16 /* a 16th of a limit is freed at a time */

/* Whose rows may go, and until what is left. */
struct need {
	const uint32_t *uid; /* NULL: anybody's */
	uint64_t used, goal;
};

void ledger_init(struct ledger *ledger, uint64_t max_bytes, uint64_t max_bytes_per_uid)
{
	*ledger = (struct ledger){.max_bytes = max_bytes, .max_bytes_per_uid = max_bytes_per_uid};
}

void ledger_deinit(struct ledger *ledger)
{
	free(ledger->rows);
}

/* Keys are hashes: their first bytes are as good as any other. */
static size_t home(const struct ledger *ledger, const struct cache_key *key)
{
	uint64_t word;

	memcpy(&word, key->bytes, sizeof(word));
	return (size_t)word & (ledger->capacity - 1);
}

/* The key's row, or the free place where it belongs. Some place is always free. */
static struct ledger_row *ledger_find(const struct ledger *ledger, const struct cache_key *key)
{
	size_t i = home(ledger, key);

	while (ledger->rows[i].bytes && memcmp(&ledger->rows[i].key, key, sizeof(*key)) != 0)
		i = (i + 1) & (ledger->capacity - 1);
	return &ledger->rows[i];
}

static bool ledger_grow(struct ledger *ledger)
{
	struct ledger old = *ledger;

	if (ledger->n < ledger->capacity / 4 * 3)
		return true;
	ledger->capacity = old.capacity ? 2 * old.capacity : LEAST_CAPACITY;
	ledger->rows = calloc(ledger->capacity, sizeof(*ledger->rows));
	if (!ledger->rows) {
		*ledger = old;
		return false;
	}
	for (size_t i = 0; i < old.capacity; i++)
		if (old.rows[i].bytes)
			*ledger_find(ledger, &old.rows[i].key) = old.rows[i];
	free(old.rows);
	return true;
}

bool ledger_put(struct ledger *ledger, const struct ledger_row *row)
{
	struct ledger_row *place;

	if (row->bytes == 0 || !ledger_grow(ledger))
		return row->bytes == 0;
	place = ledger_find(ledger, &row->key);
	if (place->bytes) {
		ledger->bytes += row->bytes - place->bytes;
		place->bytes = row->bytes;
		place->used_s = row->used_s;
		place->uid = row->uid; /* of an older form nobody had said whose it was */
		return true;
	}
	*place = *row;
	ledger->n++;
	ledger->bytes += row->bytes;
	return true;
}

void ledger_remove(struct ledger *ledger, const struct cache_key *key)
{
	struct ledger_row *row = ledger->capacity ? ledger_find(ledger, key) : NULL;
	size_t hole, i;

	if (!row || !row->bytes)
		return;
	ledger->n--;
	ledger->bytes -= row->bytes;
	hole = (size_t)(row - ledger->rows);
	ledger->rows[hole].bytes = 0;
	/* Rows that were pushed past the hole move back, so that they are found. */
	for (i = (hole + 1) & (ledger->capacity - 1); ledger->rows[i].bytes;
	     i = (i + 1) & (ledger->capacity - 1)) {
		struct ledger_row moved = ledger->rows[i];

		ledger->rows[i].bytes = 0;
		*ledger_find(ledger, &moved.key) = moved;
	}
}

bool ledger_admits(const struct ledger *ledger, uint64_t bytes)
{
	return (!ledger->max_bytes || bytes <= ledger->max_bytes) &&
	       (!ledger->max_bytes_per_uid || bytes <= ledger->max_bytes_per_uid);
}

static uint64_t bytes_of(const struct ledger *ledger, uint32_t uid)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < ledger->capacity; i++)
		if (ledger->rows[i].uid == uid)
			sum += ledger->rows[i].bytes;
	return sum;
}

static int compare_age(const void *a, const void *b)
{
	int64_t one = ((const struct ledger_row *)a)->used_s;
	int64_t other = ((const struct ledger_row *)b)->used_s;

	return (one > other) - (one < other);
}

/* Copies of the rows that may go, unused for longest first; NULL: none, or no memory. */
static struct ledger_row *candidates(const struct ledger *ledger, const uint32_t *uid,
				     size_t *ret_n)
{
	struct ledger_row *rows = calloc(ledger->n ? ledger->n : 1, sizeof(*rows));
	size_t n = 0;

	for (size_t i = 0; rows && i < ledger->capacity; i++) {
		const struct ledger_row *row = &ledger->rows[i];

		if (row->bytes && row->used_s != LEDGER_NEVER && (!uid || row->uid == *uid))
			rows[n++] = *row;
	}
	if (n > 1)
		qsort(rows, n, sizeof(*rows), compare_age);
	*ret_n = n;
	return rows;
}

static void take_out(struct ledger *ledger, const struct need *need, struct cache_key *victims,
		     size_t *n_victims)
{
	uint64_t used = need->used;
	size_t n;
	struct ledger_row *rows = candidates(ledger, need->uid, &n);

	for (size_t i = 0; rows && i < n && used > need->goal; i++) {
		used -= rows[i].bytes;
		victims[(*n_victims)++] = rows[i].key;
		ledger_remove(ledger, &rows[i].key);
	}
	free(rows);
}

/* What may be left of @used so that @bytes more stay within @limit; 0: no limit. */
static uint64_t goal(uint64_t used, uint64_t bytes, uint64_t limit)
{
	uint64_t left = limit - limit / SPARE;

	if (!limit || used + bytes <= limit)
		return used;
	return left > bytes ? left - bytes : 0;
}

size_t ledger_make_room(struct ledger *ledger, uint32_t uid, uint64_t bytes,
			struct cache_key **ret_victims)
{
	struct need own = {.uid = &uid, .used = bytes_of(ledger, uid)}, all = {0};
	struct cache_key *victims;
	size_t n = 0;

	*ret_victims = NULL;
	own.goal = goal(own.used, bytes, ledger->max_bytes_per_uid);
	if (own.goal == own.used && goal(ledger->bytes, bytes, ledger->max_bytes) == ledger->bytes)
		return 0;
	victims = calloc(ledger->n ? ledger->n : 1, sizeof(*victims));
	if (!victims)
		return 0;
	take_out(ledger, &own, victims, &n);
	all.used = ledger->bytes;
	all.goal = goal(ledger->bytes, bytes, ledger->max_bytes);
	take_out(ledger, &all, victims, &n);
	*ret_victims = victims;
	return n;
}

#define HEX_BYTES   ((size_t)2 * CACHE_KEY_BYTES)
#define STALE_S     3600 /* no build takes so long */
#define TOUCH_S     3600
#define NAME_BYTES  (CACHE_HEX_BYTES + 32)
#define LOCK_SUFFIX ".lock"

int directory_open(const char *path, bool writable, struct fmha_error *err)
{
	_cleanup_(closep) int fd = -1;
	struct stat st;
	int given;

	if (writable && mkdir(path, 0700) < 0 && errno != EEXIST)
		return fmha_error_set(err, FMHA_EIO, "cache %s: %s", path, strerror(errno));
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0 || fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "cache %s: %s", path, strerror(errno));
	if ((st.st_uid != geteuid() && (writable || st.st_uid != 0)) || (st.st_mode & 022))
		return fmha_error_set(err, FMHA_EPERM,
				      "cache %s: owner %u, mode %04o: others could write there",
				      path, (unsigned)st.st_uid, (unsigned)(st.st_mode & 07777));
	if (writable && !S_ISDIR(st.st_mode))
		return fmha_error_set(err, FMHA_EINVAL, "cache %s: not a directory", path);
	given = fd;
	fd = -1;
	return given;
}

/* A file that only we or root could have written. */
static bool trusted_file(const struct stat *st)
{
	return S_ISREG(st->st_mode) && st->st_nlink == 1 && !(st->st_mode & 022) &&
	       (st->st_uid == geteuid() || st->st_uid == 0);
}

int directory_load(int dir, const struct cache_key *key, struct cache_entry **ret_entry,
		   struct directory_file *ret_file)
{
	_cleanup_(closep) int fd = -1;
	_cleanup_(freep) void *data = NULL;
	char name[CACHE_HEX_BYTES];
	struct stat st;

	cache_key_hex(key, name);
	fd = files_open_beneath(dir, name, O_RDONLY | O_NONBLOCK, 0);
	if (fd < 0 || fstat(fd, &st) < 0 || !trusted_file(&st) || st.st_size <= 0 ||
	    (uint64_t)st.st_size > CACHE_MAX_ENTRY_BYTES)
		return CACHE_MISS;
	data = malloc((size_t)st.st_size);
	if (!data || files_read_all(fd, data, (size_t)st.st_size) < 0)
		return CACHE_MISS;
	if (ret_file)
		*ret_file = (struct directory_file){(uint64_t)st.st_size, st.st_mtime};
	return entry_parse(data, (size_t)st.st_size, key, ret_entry);
}

void directory_touch(int dir, const struct cache_key *key, const struct directory_file *file)
{
	char name[CACHE_HEX_BYTES];

	if (time(NULL) - file->used_s < TOUCH_S)
		return;
	cache_key_hex(key, name);
	(void)utimensat(dir, name, NULL, AT_SYMLINK_NOFOLLOW);
}

int directory_publish(int dir, const struct cache_key *key, const void *data, size_t size,
		      struct fmha_error *err)
{
	char name[CACHE_HEX_BYTES], temporary[NAME_BYTES];

	cache_key_hex(key, name);
	(void)snprintf(temporary, sizeof(temporary), ".%s.%d", name, (int)gettid());
	if (files_publish(dir, temporary, name, data, size) < 0)
		return fmha_error_set(err, FMHA_EIO, "cache: cannot write an entry: %s",
				      strerror(errno));
	return 0;
}

void directory_remove(int dir, const struct cache_key *key)
{
	char name[CACHE_HEX_BYTES];

	cache_key_hex(key, name);
	(void)unlinkat(dir, name, 0);
}

/* ---- locks ---- */

static void lock_name(const struct cache_key *key, char ret_name[NAME_BYTES])
{
	cache_key_hex(key, ret_name);
	(void)strcat(ret_name, LOCK_SUFFIX);
}

/* A holder unlinks the file when it is done: a descriptor may guard a name that is gone, or that
 * is another file's by now. */
static bool names_this_file(int dir, const char *name, int fd)
{
	struct stat held, linked;

	return fstat(fd, &held) == 0 && fstatat(dir, name, &linked, AT_SYMLINK_NOFOLLOW) == 0 &&
	       held.st_ino == linked.st_ino && held.st_dev == linked.st_dev;
}

/* Return: 0, CACHE_BUSY, or -1 with errno. */
static int try_lock_file(int fd)
{
	struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

	if (fcntl(fd, F_OFD_SETLK, &whole) == 0)
		return 0;
	return errno == EAGAIN || errno == EACCES || errno == EINTR ? CACHE_BUSY : -1;
}

int directory_try_lock(int dir, const struct cache_key *key, int *ret_lock, struct fmha_error *err)
{
	char name[NAME_BYTES];

	lock_name(key, name);
	for (;;) {
		int fd = files_open_beneath(dir, name, O_RDWR | O_CREAT, 0600), r;

		if (fd < 0)
			return fmha_error_set(err, FMHA_EIO, "cache: lock: %s", strerror(errno));
		r = try_lock_file(fd);
		if (r == 0 && names_this_file(dir, name, fd)) {
			*ret_lock = fd;
			return 0;
		}
		if (r < 0)
			(void)fmha_error_set(err, FMHA_EIO, "cache: lock: %s", strerror(errno));
		(void)close(fd);
		if (r != 0)
			return r < 0 ? FMHA_EIO : CACHE_BUSY;
	}
}

void directory_unlock(int dir, const struct cache_key *key, int lock)
{
	char name[NAME_BYTES];

	lock_name(key, name);
	if (names_this_file(dir, name, lock))
		(void)unlinkat(dir, name, 0);
	(void)close(lock);
}

/* ---- everything that is there ---- */

static bool key_from_hex(const char *hex, struct cache_key *ret_key)
{
	if (strspn(hex, "0123456789abcdef") != HEX_BYTES)
		return false;
	for (size_t i = 0; i < CACHE_KEY_BYTES; i++) {
		unsigned byte = 0;

		(void)sscanf(hex + 2 * i, "%2x", &byte);
		ret_key->bytes[i] = (uint8_t)byte;
	}
	return true;
}

/* Only a file of ours, by name and owner, is ever removed. */
static bool is_stale(int dir, const char *name)
{
	struct stat st;

	return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
	       st.st_uid == geteuid() && time(NULL) - st.st_mtime >= STALE_S;
}

static void sweep_lock(int dir, const struct cache_key *key, const char *name)
{
	int lock;

	if (is_stale(dir, name) && directory_try_lock(dir, key, &lock, NULL) == 0)
		directory_unlock(dir, key, lock);
}

static bool visit_entry(int dir, const char *name, const struct cache_key *key,
			directory_visit visit, void *owner)
{
	_cleanup_(closep) int fd = files_open_beneath(dir, name, O_RDONLY | O_NONBLOCK, 0);
	uint8_t head[ENTRY_HEAD_BYTES];
	struct directory_file file;
	uint32_t uid = 0;
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
		return true;
	file = (struct directory_file){(uint64_t)st.st_size, st.st_mtime};
	/* What no load will ever return goes first when room is needed. */
	if (files_read_all(fd, head, sizeof(head)) < 0 || !entry_owner(head, &uid))
		file.used_s = 0;
	return visit(owner, key, &file, uid);
}

static bool scan_name(int dir, const char *name, directory_visit visit, void *owner)
{
	bool temporary = name[0] == '.';
	struct cache_key key;
	const char *rest;

	if (!key_from_hex(name + temporary, &key))
		return true;
	rest = name + temporary + HEX_BYTES;
	if (temporary && *rest == '.' && is_stale(dir, name))
		(void)unlinkat(dir, name, 0);
	else if (!temporary && strcmp(rest, LOCK_SUFFIX) == 0)
		sweep_lock(dir, &key, name);
	else if (!temporary && !*rest)
		return visit_entry(dir, name, &key, visit, owner);
	return true;
}

int directory_scan(int dir, directory_visit visit, void *owner, struct fmha_error *err)
{
	int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	_cleanup_(closedirp) DIR *stream = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *item;

	if (!stream) {
		closep(&copy);
		return fmha_error_set(err, FMHA_EIO, "cache: cannot list the entries: %s",
				      strerror(errno));
	}
	while ((item = readdir(stream)))
		if (!scan_name(dir, item->d_name, visit, owner))
			return fmha_error_set(err, FMHA_EIO, "cache: too many entries");
	return 0;
}
