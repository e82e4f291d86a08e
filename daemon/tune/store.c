/* SPDX-License-Identifier: MIT */
#include <tune/store.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <files/files.h>
#include <proto/cleanup.h>
#include <proto/error.h>

#define MAX_STALE 16 /* files of other environments that are kept of a model */
#define MISSING   1

/*
 * Where the machine's daemon keeps its state: root's, and that of a service's user whom an
 * administrator gave the folder, started by whatever means.
 */
static bool is_ours(const char *path)
{
	struct stat st;

	return geteuid() == 0 ||
	       (stat(path, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid());
}

static void choose_directory(char path[PATH_MAX], const char *state)
{
	const char *systemd = getenv("STATE_DIRECTORY"), *xdg = getenv("XDG_STATE_HOME");
	const char *home = getenv("HOME");
	int n;

	if (state && *state)
		n = snprintf(path, PATH_MAX, "%s", state);
	else if (systemd && systemd[0] == '/') /* several are parted by colons; ours is the first */
		n = snprintf(path, PATH_MAX, "%.*s/tuned", (int)strcspn(systemd, ":"), systemd);
	else if (is_ours("/var/lib/fmhad"))
		n = snprintf(path, PATH_MAX, "/var/lib/fmhad/tuned");
	else if (xdg && xdg[0] == '/')
		n = snprintf(path, PATH_MAX, "%s/fmhad/tuned", xdg);
	else if (home && home[0] == '/')
		n = snprintf(path, PATH_MAX, "%s/.local/state/fmhad/tuned", home);
	else
		n = 0;
	if (n <= 0 || n >= PATH_MAX)
		path[0] = '\0';
}

void tune_store_init(struct tune_store *store, const char *state, const char *system)
{
	*store = (struct tune_store){.fd = -1};
	choose_directory(store->directory, state);
	(void)snprintf(store->system, sizeof(store->system), "%s",
		       system && *system ? system : FMHAD_TUNED_DIR);
}

void tune_store_deinit(struct tune_store *store)
{
	if (store->fd >= 0)
		(void)close(store->fd);
	store->fd = -1;
}

/* With the folders above it, as far as we may make them. */
static void make_directory(const char *path)
{
	char part[PATH_MAX];

	(void)snprintf(part, sizeof(part), "%s", path);
	for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		(void)mkdir(part, 0700);
		*slash = '/';
	}
	(void)mkdir(part, 0700);
}

/* Ours, and nobody else's to write to: what lies there decides which kernels run. */
static int open_directory(const char *path, bool own, struct fmha_error *err)
{
	_cleanup_(closep) int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
	struct stat st;
	int given;

	if (fd < 0 || fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "%.150s: %s", path, strerror(errno));
	if ((st.st_uid != geteuid() && (own || st.st_uid != 0)) || (st.st_mode & 022))
		return fmha_error_set(err, FMHA_EPERM,
				      "%.150s: owner %u, mode %04o: others could write there", path,
				      (unsigned)st.st_uid, (unsigned)(st.st_mode & 07777));
	given = fd;
	fd = -1;
	return given;
}

/* Return: 0 and a text (given), MISSING, or FMHA_E*. */
static int store_read_file(int dir, const char *name, char **ret_text, size_t *ret_size,
			   struct fmha_error *err)
{
	_cleanup_(closep) int fd = files_open_beneath(dir, name, O_RDONLY | O_NONBLOCK, 0);
	_cleanup_(freep) char *text = NULL;
	struct stat st;

	if (fd < 0 && errno == ENOENT)
		return MISSING;
	if (fd < 0 || fstat(fd, &st) < 0)
		return fmha_error_set(err, FMHA_EIO, "%s", strerror(errno));
	if (st.st_uid != geteuid() && st.st_uid != 0)
		return fmha_error_set(err, FMHA_EPERM, "it is user %u's", (unsigned)st.st_uid);
	if (!S_ISREG(st.st_mode) || st.st_size > (off_t)TUNE_MAX_BYTES || (st.st_mode & 022))
		return fmha_error_set(err, FMHA_EINVAL,
				      "not a file of at most 8 MiB that only its owner writes");
	text = malloc((size_t)st.st_size + 1);
	if (!text)
		return fmha_error_set(err, FMHA_ENOMEM, "out of memory");
	if (files_read_all(fd, text, (size_t)st.st_size) < 0)
		return fmha_error_set(err, FMHA_EIO, "it cannot be read");
	*ret_size = (size_t)st.st_size;
	*ret_text = text;
	text = NULL;
	return 0;
}

/* Return: whether it may be written over. @reason: why not, or "". */
static bool store_load(int dir, const char *path, const char *name, bool settings, bool own,
		       struct tune_database *database, char reason[256])
{
	_cleanup_(freep) char *text = NULL;
	struct fmha_error err;
	size_t size = 0;
	int r = store_read_file(dir, name, &text, &size, &err);

	if (r == MISSING)
		return true;
	if (r == 0)
		r = settings ? tune_database_read_settings(database, text, size, &err)
			     : tune_database_read_results(database, text, size, own, &err);
	if (r < 0)
		(void)snprintf(reason, 256, "%.100s/%.60s: %.80s", path, name, err.msg);
	return r == 0;
}

/* Results of other environments stay; of too many the one that changed longest ago goes. */
static size_t count_stale(int dir, const struct proto_worker_ready_params *identity)
{
	char current[TUNE_NAME_BYTES], oldest[TUNE_NAME_BYTES] = "";
	size_t prefix, n = 0;
	time_t oldest_s = 0;
	const struct dirent *entry;
	int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *list = copy >= 0 ? fdopendir(copy) : NULL;

	if (!list) {
		if (copy >= 0)
			(void)close(copy);
		return 0;
	}
	tune_results_file(identity, current);
	prefix = strlen(current) - strlen("0123456789abcdef.json");
	while ((entry = readdir(list))) {
		struct stat st;

		if (strlen(entry->d_name) != strlen(current) ||
		    strncmp(entry->d_name, current, prefix) != 0 ||
		    strspn(entry->d_name + prefix, "0123456789abcdef") != 16 ||
		    strcmp(entry->d_name, current) == 0 ||
		    fstatat(dir, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0)
			continue;
		n++;
		if (!*oldest || st.st_mtime < oldest_s) {
			(void)snprintf(oldest, sizeof(oldest), "%.*s", (int)sizeof(oldest) - 1,
				       entry->d_name);
			oldest_s = st.st_mtime;
		}
	}
	(void)closedir(list);
	if (n > MAX_STALE)
		(void)unlinkat(dir, oldest, 0);
	return n;
}

/* ---- the owner ---- */

#define OWNER ".owner" /* who it is, for those who find the directory locked */

static void tell_owner(int dir)
{
	_cleanup_(closep) int fd = files_open_beneath(dir, OWNER, O_WRONLY | O_CREAT | O_TRUNC,
						      0600);

	if (fd >= 0)
		(void)dprintf(fd, "%ld\n", (long)getpid());
}

static long read_owner(int dir)
{
	_cleanup_(closep) int fd = files_open_beneath(dir, OWNER, O_RDONLY | O_NONBLOCK, 0);
	char text[24] = "";

	return fd >= 0 && read(fd, text, sizeof(text) - 1) > 0 ? strtol(text, NULL, 10) : 0;
}

/* One daemon has a directory, for life: two would take turns undoing each other's results. */
static int lock_directory(struct tune_store *store, struct fmha_error *err)
{
	_cleanup_(closep) int fd = -1;

	if (store->fd >= 0)
		return 0;
	if (!*store->directory)
		return fmha_error_set(err, FMHA_EIO, "there is no state directory");
	make_directory(store->directory);
	fd = open_directory(store->directory, true, err);
	if (fd < 0)
		return fd;
	if (faccessat(fd, ".", W_OK | X_OK, AT_EACCESS) < 0)
		return fmha_error_set(err, FMHA_EIO, "%.150s: %s", store->directory,
				      strerror(errno));
	if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		store->was_anothers = true;
		return fmha_error_set(err, FMHA_EBUSY,
				      "%.150s: another fmhad, process %ld, writes there",
				      store->directory, read_owner(fd));
	}
	tell_owner(fd);
	store->fd = fd;
	fd = -1;
	return 0;
}

void tune_store_load(struct tune_store *store, struct tune_database *database,
		     struct tune_store_report *ret_report)
{
	struct tune_store_report *report = ret_report;
	const struct proto_worker_ready_params *identity = tune_database_identity(database);
	char results[TUNE_NAME_BYTES], settings[TUNE_NAME_BYTES];
	struct fmha_error err;
	int dir;

	*report = (struct tune_store_report){.results_readable = true, .settings_readable = true};
	tune_results_file(identity, results);
	tune_settings_file(identity, settings);
	if (*store->system && access(store->system, F_OK) == 0) {
		dir = open_directory(store->system, false, &err);
		if (dir < 0) {
			(void)snprintf(report->system, sizeof(report->system), "%.250s", err.msg);
		} else {
			(void)store_load(dir, store->system, results, false, false, database,
					 report->system);
			(void)close(dir);
		}
	}
	if (lock_directory(store, &err) < 0)
		(void)snprintf(report->unwritable, sizeof(report->unwritable), "%.250s", err.msg);
	else
		store->was_anothers = false;
	if (!*store->directory || access(store->directory, F_OK) != 0)
		return;
	dir = open_directory(store->directory, true, &err);
	if (dir < 0) {
		report->results_readable = report->settings_readable = false;
		(void)snprintf(report->results, sizeof(report->results), "%.250s", err.msg);
		return;
	}
	report->results_readable = store_load(dir, store->directory, results, false, true, database,
					      report->results);
	report->settings_readable = store_load(dir, store->directory, settings, true, true,
					       database, report->settings);
	report->n_stale = count_stale(dir, identity);
	(void)close(dir);
}

int tune_store_write(struct tune_store *store, const char *name, const char *text,
		     struct fmha_error *err)
{
	char temporary[TUNE_NAME_BYTES + 8];
	int r = lock_directory(store, err);

	if (r < 0)
		return r;
	if (store->was_anothers)
		return fmha_error_set(err, FMHA_EBUSY,
				      "%.150s: it is ours now, and read again first",
				      store->directory);
	/* The lock is ours: whoever left one of this name has crashed. */
	(void)snprintf(temporary, sizeof(temporary), ".%s.new", name);
	if (files_publish(store->fd, temporary, name, text, strlen(text)) < 0)
		return fmha_error_set(err, FMHA_EIO, "%.120s/%.80s: %s", store->directory, name,
				      strerror(errno));
	return 0;
}
