/* SPDX-License-Identifier: MIT */
/* pool_file.c: see pool_file.h. */
#include "pool_impl.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <files/files.h>
#include <proto/cleanup.h>

#include <base/clock.h>
#include <base/log.h>

#define BLOCK      4096
#define VERSION    1
#define MANY       64                 /* pages of one piece of work */
#define AT_A_TIME  (8u << 20)         /* bytes of it, one page or more */
#define RUN_BYTES  (4u << 20)         /* of one read or write, likewise */
#define ENTRIES    4096               /* that are read at a time */
#define PAUSE_NS   (10ull * NS_PER_S) /* after a failure to write */
#define WORKS_MOST 2                  /* of all pools: other work needs threads, too */
#define FILES_MOST 4096

struct head {
	char magic[8];
	uint32_t version, n_places;
	uint64_t page_bytes;
	uint32_t uid, unused; /* no padding: it is compared byte by byte */
	char name[PROTO_NAME_BYTES], layout[PROTO_LAYOUT_BYTES];
};

static const char magic[8] = "fmhapool";

struct entry {
	uint8_t key[KVPOOL_KEY_BYTES];
	uint64_t checksum, is_used, unused[2];
};

enum work_kind { WORK_LOAD, WORK_READ, WORK_WRITE };

struct pool_file {
	struct pool *pool;
	struct kvspill *spill;
	char path[CONFIG_FILE_BYTES + PROTO_NAME_BYTES + 16];
	uint32_t n_places;
	uint64_t paused_until_ns; /* for all but reading back */

	bool busy; /* with this, which belongs to another thread meanwhile */
	uv_work_t work;
	enum work_kind kind;
	uint32_t n_loaded;     /* of n_places, whose entries were looked at */
	struct entry *entries; /* while that goes on */
	struct kvspill_copy copies[MANY];
	bool good[MANY];
	uint32_t n;
	int error; /* errno of what failed first */
};

static uint64_t places_at(uint32_t n_places)
{
	uint64_t end = BLOCK + (uint64_t)n_places * sizeof(struct entry);

	return (end + BLOCK - 1) / BLOCK * BLOCK;
}

uint64_t pool_file_bytes(uint64_t page_bytes, uint32_t n_places)
{
	return places_at(n_places) + n_places * page_bytes;
}

uint64_t pool_file_cost(uint32_t n_pages, uint32_t n_places)
{
	return sizeof(struct pool_file) + ENTRIES * sizeof(struct entry) +
	       kvspill_cost(n_pages, n_places);
}

/* ---- on another thread ---- */

static uint64_t mix(uint64_t a, uint64_t b)
{
	unsigned __int128 product = (unsigned __int128)a * b;

	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Of what a place holds: not against people, who cannot write the file, but against disks and crashes. */
static uint64_t checksum_of(const struct kvspill_copy *copy, const uint8_t *data, size_t n)
{
	enum { LANES = 4 };
	static const uint64_t odd[LANES] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9,
					    0x94d049bb133111eb, 0xd6e8feb86659fd93};
	uint64_t lane[LANES], words[2 * LANES], sum = copy->place + 1;

	memcpy(lane, copy->key, sizeof(lane));
	for (size_t at = 0; at < n; at += sizeof(words)) {
		memcpy(words, data + at, sizeof(words));
		for (size_t i = 0; i < LANES; i++)
			lane[i] = mix(words[2 * i] ^ odd[i], words[2 * i + 1] ^ lane[i]) + at;
	}
	for (size_t i = 0; i < LANES; i++)
		sum = mix(sum ^ odd[i], lane[i] | 1) + lane[i];
	return sum;
}

/* Past the page cache, where the file system can do that: what is in it twice is memory that pools could have. */
static int open_places(const struct pool_file *file)
{
	int fd = open(file->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_DIRECT);

	return fd < 0 && errno == EINVAL ? open(file->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) : fd;
}

static struct head head_of(const struct pool_file *file)
{
	const struct pool *pool = file->pool;
	struct head head;

	memset(&head, 0, sizeof(head));
	head.version = VERSION;
	head.n_places = file->n_places;
	head.page_bytes = pool->page_bytes;
	head.uid = pool->account->uid;
	memcpy(head.magic, magic, sizeof(magic));
	memcpy(head.name, pool->name, sizeof(head.name));
	memcpy(head.layout, pool->layout, sizeof(head.layout));
	return head;
}

/* One that is not of this pool is emptied. Return: 0, or errno. */
static int make_whole(const struct pool_file *file, int fd)
{
	uint64_t bytes = pool_file_bytes(file->pool->page_bytes, file->n_places);
	struct head head = head_of(file), there = {0};
	struct stat st;

	if (fstat(fd, &st) == 0 && (uint64_t)st.st_size == bytes &&
	    files_read_at(fd, &there, sizeof(there), 0) == 0 &&
	    memcmp(&head, &there, sizeof(head)) == 0)
		return futimens(fd, NULL) < 0 ? errno : 0; /* the newest are kept */
	if (ftruncate(fd, 0) < 0 || ftruncate(fd, (off_t)bytes) < 0 ||
	    files_write_at(fd, &head, sizeof(head), 0) < 0)
		return errno;
	return 0;
}

/* The next entries, the first time with the file. */
static int load(struct pool_file *file)
{
	_cleanup_(closep) int fd = open(file->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW,
					0600);
	off_t at = BLOCK + (off_t)(file->n_loaded * sizeof(struct entry));
	int r = fd < 0 ? errno : 0;

	if (r == 0 && file->n_loaded == 0)
		r = make_whole(file, fd);
	if (r == 0 && files_read_at(fd, file->entries, file->n * sizeof(struct entry), at) < 0)
		r = errno;
	return r;
}

/* How many copies from @i on have places one behind the other, in one run's bytes. */
static uint32_t run_of(const struct pool_file *file, uint32_t i)
{
	uint32_t n = 1;

	while (i + n < file->n && (n + 1) * file->pool->page_bytes <= RUN_BYTES &&
	       file->copies[i + n].place == file->copies[i].place + n)
		n++;
	return n;
}

static off_t place_offset(const struct pool_file *file, uint32_t i)
{
	return (off_t)(places_at(file->n_places) + file->copies[i].place * file->pool->page_bytes);
}

static bool read_run(struct pool_file *file, int fd, uint8_t *buffer, uint32_t i, uint32_t n)
{
	uint64_t bytes = file->pool->page_bytes;

	if (files_read_at(fd, buffer, n * bytes, place_offset(file, i)) < 0)
		return false;
	for (uint32_t j = 0; j < n; j++) {
		const struct kvspill_copy *copy = &file->copies[i + j];

		file->good[i + j] = checksum_of(copy, buffer + j * bytes, bytes) ==
					    copy->checksum &&
				    files_write_at(file->pool->fd, buffer + j * bytes, bytes,
						   (off_t)(copy->page * bytes)) == 0;
	}
	return true;
}

static bool write_run(struct pool_file *file, int fd, uint8_t *buffer, uint32_t i, uint32_t n)
{
	uint64_t bytes = file->pool->page_bytes;

	for (uint32_t j = 0; j < n; j++) {
		struct kvspill_copy *copy = &file->copies[i + j];

		if (files_read_at(file->pool->fd, buffer + j * bytes, bytes,
				  (off_t)(copy->page * bytes)) < 0)
			return false;
		copy->checksum = checksum_of(copy, buffer + j * bytes, bytes);
	}
	if (files_write_at(fd, buffer, n * bytes, place_offset(file, i)) < 0)
		return false;
	for (uint32_t j = 0; j < n; j++)
		file->good[i + j] = true;
	return true;
}

/* After the places: an entry that is older than its place has another checksum. */
static int write_entries(struct pool_file *file)
{
	_cleanup_(closep) int fd = open(file->path, O_WRONLY | O_CLOEXEC | O_NOFOLLOW);

	if (fd < 0)
		return errno;
	for (uint32_t i = 0; i < file->n; i++) {
		const struct kvspill_copy *copy = &file->copies[i];
		struct entry entry = {.checksum = copy->checksum, .is_used = 1};

		memcpy(entry.key, copy->key, sizeof(entry.key));
		if (file->good[i] &&
		    files_write_at(fd, &entry, sizeof(entry),
				   (off_t)(BLOCK + copy->place * sizeof(struct entry))) < 0)
			return errno;
	}
	return 0;
}

static int copy_pages(struct pool_file *file)
{
	uint64_t bytes = file->pool->page_bytes;
	_cleanup_(closep) int fd = open_places(file);
	_cleanup_(freep) uint8_t *buffer = NULL;

	if (fd < 0)
		return errno;
	buffer = aligned_alloc(BLOCK, bytes > RUN_BYTES ? bytes : RUN_BYTES);
	if (!buffer)
		return ENOMEM;
	for (uint32_t i = 0, n; i < file->n; i += n) {
		n = run_of(file, i);
		if (!(file->kind == WORK_READ ? read_run : write_run)(file, fd, buffer, i, n))
			return errno;
	}
	return file->kind == WORK_WRITE ? write_entries(file) : 0;
}

static void do_work(uv_work_t *work)
{
	struct pool_file *file = container_of(work, struct pool_file, work);

	file->error = file->kind == WORK_LOAD ? load(file) : copy_pages(file);
}

/* ---- on the loop ---- */

static void file_go_on(struct pool_file *file);

/* What failed is tried again: a disk that is full now is not for good. */
static void take_entries(struct pool_file *file)
{
	if (file->error) {
		file->paused_until_ns = clock_ns() + PAUSE_NS;
		return;
	}
	for (uint32_t i = 0; i < file->n; i++)
		if (file->entries[i].is_used == 1)
			kvspill_found(file->spill, file->n_loaded + i, file->entries[i].key,
				      file->entries[i].checksum);
	file->n_loaded += file->n;
	if (file->n_loaded == file->n_places) {
		free(file->entries);
		file->entries = NULL;
	}
}

static void take_copies(struct pool_file *file)
{
	for (uint32_t i = 0; i < file->n; i++) {
		if (file->kind == WORK_READ)
			kvspill_restored(file->spill, &file->copies[i], file->good[i]);
		else
			kvspill_written(file->spill, &file->copies[i],
					file->good[i] && !file->error);
	}
	if (file->error && file->kind == WORK_WRITE)
		file->paused_until_ns = clock_ns() + PAUSE_NS;
}

static void on_worked(uv_work_t *work, int status)
{
	struct pool_file *file = container_of(work, struct pool_file, work);
	struct pools *pools = file->pool->pools;
	struct doing *doing = &pools->front->doing;
	struct doing_before before = doing_begin(doing, DOING_COMPLETION, file->pool->account->uid);

	(void)status; /* it is never cancelled */
	file->busy = false;
	pools->n_file_works--;
	if (file->pool->dropped)
		pool_file_remove(file); /* the work may have made it once more */
	else if (file->error)
		log_limited(&pools->log, LOG_LEVEL_WARNING, "%s: %s: pages are not copied",
			    file->path, strerror(file->error));
	if (file->kind == WORK_LOAD)
		take_entries(file);
	else
		take_copies(file);
	pools->end_use(file->pool); /* it may be gone now */
	list_for_each_entry(struct pool, pool, &pools->list, in_pools) {
		if (pool->file)
			file_go_on(pool->file);
	}
	doing_end(doing, before);
}

static bool next_copy(struct pool_file *file)
{
	struct kvspill_copy *copy = &file->copies[file->n];

	return file->kind == WORK_READ ? kvspill_next_read(file->spill, copy)
				       : kvspill_next_write(file->spill, copy);
}

static void collect(struct pool_file *file, enum work_kind kind)
{
	uint64_t bytes = file->pool->page_bytes;

	file->kind = kind;
	file->n = 0;
	memset(file->good, 0, sizeof(file->good));
	while (file->n < MANY && (file->n == 0 || (file->n + 1) * bytes <= AT_A_TIME) &&
	       next_copy(file))
		file->n++;
}

static void collect_entries(struct pool_file *file, uint32_t left)
{
	file->kind = WORK_LOAD;
	file->n = left < ENTRIES ? left : ENTRIES;
}

/* Whether work of a dropped pool may still write to what has this one's path. */
static bool has_rival(const struct pool_file *file)
{
	list_for_each_entry(struct pool, pool, &file->pool->pools->ended, in_pools) {
		if (pool->file && pool->file->busy && strcmp(pool->file->path, file->path) == 0)
			return true;
	}
	return false;
}

/* Begins with what is next, unless something is under way. */
static void file_go_on(struct pool_file *file)
{
	struct pools *pools = file->pool->pools;
	uint32_t left = file->n_places - file->n_loaded;

	if (file->busy || file->pool->dropped || pools->n_file_works >= WORKS_MOST)
		return;
	file->error = 0;
	file->n = 0;
	if (left == 0)
		collect(file, WORK_READ);
	if (file->n == 0 && clock_ns() >= file->paused_until_ns) {
		if (left == 0)
			collect(file, WORK_WRITE);
		else if (!has_rival(file))
			collect_entries(file, left);
	}
	if (file->n == 0)
		return;
	if (uv_queue_work(&pools->front->loop, &file->work, do_work, on_worked) < 0) {
		file->error = EAGAIN;
		if (file->kind == WORK_LOAD)
			take_entries(file);
		else
			take_copies(file);
		return;
	}
	file->busy = true;
	file->pool->n_users++;
	pools->n_file_works++;
}

/* Names have no slash, and no file of ours ends as what is being removed does. */
static void path_of(const struct pools *pools, uint32_t uid, const char *name, char *ret_path,
		    size_t n)
{
	(void)snprintf(ret_path, n, "%s/%u-%s.pool", pools->front->config.pool_spill, uid, name);
}

struct pool_file *pool_file_new(struct pool *pool, uint32_t n_places, uint64_t secret)
{
	struct pool_file *file = calloc(1, sizeof(*file));

	if (!file)
		return NULL;
	file->pool = pool;
	file->n_places = n_places;
	file->entries = malloc(ENTRIES * sizeof(struct entry));
	file->spill = kvspill_new(pool->pages, pool->n_pages, n_places, secret);
	if (!file->entries || !file->spill)
		return pool_file_free(file);
	path_of(pool->pools, pool->account->uid, pool->name, file->path, sizeof(file->path));
	file_go_on(file);
	return file;
}

static void on_removed(uv_fs_t *request)
{
	uv_fs_req_cleanup(request);
	free(request);
}

/* Its name is free at once; its blocks, which may take long, on another thread. Return: whether it was there. */
static bool remove_file(struct pools *pools, const char *path)
{
	char dead[CONFIG_FILE_BYTES + PROTO_NAME_BYTES + 24];
	uv_fs_t *request = malloc(sizeof(*request));

	(void)snprintf(dead, sizeof(dead), "%s.gone", path);
	if (rename(path, dead) < 0) {
		free(request);
		return false;
	}
	if (!request || uv_fs_unlink(&pools->front->loop, request, dead, on_removed) < 0) {
		free(request);
		(void)unlink(dead);
	}
	return true;
}

void pool_file_remove(struct pool_file *file)
{
	if (file)
		(void)remove_file(file->pool->pools, file->path);
}

struct pool_file *pool_file_free(struct pool_file *file)
{
	if (!file)
		return NULL;
	(void)kvspill_free(file->spill);
	free(file->entries);
	free(file);
	return NULL;
}

void pool_file_sealed(struct pool_file *file, uint32_t page)
{
	if (!file)
		return;
	kvspill_sealed(file->spill, page);
	file_go_on(file);
}

uint32_t pool_file_want(struct pool_file *file, const uint8_t (*keys)[KVPOOL_KEY_BYTES], uint32_t n)
{
	uint32_t coming;

	if (!file)
		return 0;
	coming = kvspill_want(file->spill, keys, n);
	if (coming > 0 || file->n_loaded < file->n_places)
		file_go_on(file);
	return coming;
}

void pool_file_json(const struct pool_file *file, cJSON *item)
{
	struct kvspill_counts counts = {0};

	if (file)
		counts = kvspill_count(file->spill);
	cJSON_AddNumberToObject(item, "file_pages", file ? file->n_places : 0);
	cJSON_AddNumberToObject(item, "filed", counts.n_good);
	cJSON_AddNumberToObject(item, "written", (double)counts.written);
	cJSON_AddNumberToObject(item, "restored", (double)counts.restored);
	cJSON_AddNumberToObject(item, "file_failures", (double)counts.failed);
}

/* ---- files of daemons before this one ---- */

bool pool_file_drop(struct pools *pools, uint32_t uid, const char *name)
{
	char path[CONFIG_FILE_BYTES + PROTO_NAME_BYTES + 16];

	if (!*pools->front->config.pool_spill)
		return false;
	path_of(pools, uid, name, path, sizeof(path));
	return remove_file(pools, path);
}

struct left {
	char name[PROTO_NAME_BYTES + 24];
	time_t used;
	uint64_t bytes;
};

static int newest_first(const void *a, const void *b)
{
	const struct left *x = a, *y = b;

	return (x->used < y->used) - (x->used > y->used);
}

/* Return: how many of @left were filled. */
static size_t look_around(DIR *folder, struct left *left)
{
	struct dirent *item;
	struct stat st;
	size_t n = 0;

	while (n < FILES_MOST && (item = readdir(folder))) {
		if (strlen(item->d_name) >= sizeof(left[n].name) ||
		    fstatat(dirfd(folder), item->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
		    !S_ISREG(st.st_mode))
			continue;
		left[n] = (struct left){.used = st.st_mtime, .bytes = (uint64_t)st.st_size};
		memcpy(left[n++].name, item->d_name, strlen(item->d_name) + 1);
	}
	return n;
}

static bool has_suffix(const char *name, const char *suffix)
{
	size_t n = strlen(name), m = strlen(suffix);

	return n > m && strcmp(name + n - m, suffix) == 0;
}

static bool is_used(const struct pools *pools, const char *path)
{
	list_for_each_entry(struct pool, pool, &pools->list, in_pools) {
		if (pool->file && strcmp(pool->file->path, path) == 0)
			return true;
	}
	return false;
}

/* @all: of those that no pool has, not only of what is too much. */
static void sweep(struct pools *pools, bool all)
{
	const char *folder_path = pools->front->config.pool_spill;
	uint64_t most = pools->front->limits.value[LIMIT_POOL_SPILL_BYTES], kept = 0;
	_cleanup_(freep) struct left *left = calloc(FILES_MOST, sizeof(*left));
	DIR *folder = left ? opendir(folder_path) : NULL;
	size_t n;

	if (!folder)
		return;
	n = look_around(folder, left);
	(void)closedir(folder);
	qsort(left, n, sizeof(*left), newest_first);
	for (size_t i = 0; i < n; i++) {
		char path[CONFIG_FILE_BYTES + sizeof(left[i].name) + 1];

		(void)snprintf(path, sizeof(path), "%s/%s", folder_path, left[i].name);
		if (has_suffix(path, ".pool.gone")) {
			(void)unlink(path);
		} else if (has_suffix(path, ".pool") && !is_used(pools, path)) {
			kept += left[i].bytes;
			if (all || kept > most) {
				(void)remove_file(pools, path);
				kept -= left[i].bytes;
			}
		}
	}
}

static void on_sweep(uv_timer_t *timer)
{
	sweep(container_of(timer, struct pools, sweep), true);
}

void pool_file_init(struct pools *pools)
{
	uint64_t idle_ms = pools->front->limits.value[LIMIT_POOL_IDLE_S] * 1000;
	const char *path = pools->front->config.pool_spill;

	uv_timer_init(&pools->front->loop, &pools->sweep);
	if (!*path)
		return;
	if (mkdir(path, 0700) < 0 && errno != EEXIST)
		log_warning("%s: %s: pools have no files", path, strerror(errno));
	sweep(pools, false);
	if (idle_ms > 0)
		uv_timer_start(&pools->sweep, on_sweep, idle_ms, idle_ms);
}
