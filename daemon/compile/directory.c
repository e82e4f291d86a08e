/* SPDX-License-Identifier: MIT */
#include "directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include <files/files.h>
#include <proto/error.h>

#include "cleanup.h"
#include "entry.h"

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
