/* SPDX-License-Identifier: MIT */
/*
 * listen.c: the socket that clients connect to, inherited from the service manager or made here.
 *
 * A socket file that nobody listens on any more is replaced. Two daemons that start at once are
 * kept apart by a lock on the directory, which the kernel releases however they end.
 */
#include "front.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <base/notify.h>
#include <proto/error.h>

#define BACKLOG 256

static int system_error(struct fmha_error *err, const char *path, const char *what)
{
	return fmha_error_set_field(err, FMHA_EIO, "socket", "%s: %s: %s", path, what,
				    strerror(errno));
}

/* The directory of @path, locked; -1: failed. */
static int lock_directory(const char *path, struct fmha_error *err)
{
	char directory[CONFIG_PATH_BYTES];
	char *slash;
	int fd;

	snprintf(directory, sizeof(directory), "%s", path);
	slash = strrchr(directory, '/');
	if (slash)
		slash[slash == directory] = '\0';
	else
		strcpy(directory, ".");
	fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0 && errno == ENOENT) {
		fmha_error_set_field(
			err, FMHA_EIO, "socket",
			"%s: %s; make it with mkdir -p, or name another path with --socket",
			directory, strerror(errno));
		return -1;
	}
	if (fd < 0 || flock(fd, LOCK_EX) < 0) {
		system_error(err, directory, "cannot be used");
		if (fd >= 0)
			(void)close(fd);
		return -1;
	}
	return fd;
}

/* Removes a socket file whose daemon is gone. Anything else stays and is an error. */
static int remove_stale(const struct sockaddr_un *address, struct fmha_error *err)
{
	const char *path = address->sun_path;
	struct stat st;
	int fd, r;

	if (lstat(path, &st) < 0)
		return errno == ENOENT ? 0 : system_error(err, path, "cannot be used");
	if (!S_ISSOCK(st.st_mode))
		return fmha_error_set_field(err, FMHA_EINVAL, "socket",
					    "%s: exists and is no socket", path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return system_error(err, path, "socket");
	r = connect(fd, (const struct sockaddr *)address, sizeof(*address));
	(void)close(fd);
	if (r == 0 || errno != ECONNREFUSED)
		return fmha_error_set_field(
			err, FMHA_EINVAL, "socket",
			"%s: another daemon listens on it; the machine's ends by systemctl stop "
			"fmhad.socket fmhad.service; one beside it needs a path of its own: "
			"--socket",
			path);
	return unlink(path) < 0 ? system_error(err, path, "cannot be removed") : 0;
}

static int set_owner(const struct config *config, const char *path, struct fmha_error *err)
{
	struct group *group;

	if (config->socket_group[0]) {
		group = getgrnam(config->socket_group);
		if (!group)
			return fmha_error_set_field(
				err, FMHA_EINVAL, "socket_group",
				"socket_group %s: no such group; make it with groupadd, "
				"or name another",
				config->socket_group);
		if (chown(path, (uid_t)-1, group->gr_gid) < 0)
			return system_error(err, path, "chown");
	}
	return chmod(path, config->socket_mode) < 0 ? system_error(err, path, "chmod") : 0;
}

/* Nobody can connect before listen(), so the file's owner and mode are right from the start. */
static int make_socket(const struct config *config, const char *path, int *ret_fd,
		       struct fmha_error *err)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd, r;

	snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	r = remove_stale(&address, err);
	if (r < 0)
		return r;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return system_error(err, path, "socket");
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		r = system_error(err, path, "bind");
		(void)close(fd);
		return r;
	}
	r = set_owner(config, path, err);
	if (r == 0 && listen(fd, BACKLOG) < 0)
		r = system_error(err, path, "listen");
	if (r < 0) {
		(void)unlink(path);
		(void)close(fd);
		return r;
	}
	*ret_fd = fd;
	return 0;
}

int listen_at(const struct config *config, const char *path, int *ret_fd, struct fmha_error *err)
{
	int lock = lock_directory(path, err), r;

	if (lock < 0)
		return FMHA_EIO;
	r = make_socket(config, path, ret_fd, err);
	(void)close(lock);
	return r;
}

int listen_open(struct front *front, struct fmha_error *err)
{
	int r;

	front->listen_fd = -1;
	r = notify_listen_fd(&front->listen_fd, err);
	if (r < 0)
		return r;
	if (front->listen_fd >= 0) {
		front->inherited_listener = true;
		return 0;
	}
	return listen_at(&front->config, front->config.socket, &front->listen_fd, err);
}

void listen_close(struct front *front)
{
	if (front->listen_fd < 0)
		return;
	/* First the name, then the socket: a client sees either a daemon or no file. */
	if (!front->inherited_listener)
		(void)unlink(front->config.socket);
	(void)close(front->listen_fd);
	front->listen_fd = -1;
}
