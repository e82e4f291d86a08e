/* SPDX-License-Identifier: MIT */
/* check.c: fmhad --check: what a configuration asks of this machine, before anybody depends on it. */
#include "check.h"

#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <base/log.h>
#include <device/device.h>

/* Each fault is a line of its own; all of them are told. Return: how many. */
static int check_group(const struct config *config)
{
	if (!config->socket_group[0] || getgrnam(config->socket_group))
		return 0;
	log_error("socket_group %s: no such group; make it with groupadd, or name another",
		  config->socket_group);
	return 1;
}

static int check_devices(const struct config *config)
{
	int n = 0;

	for (uint32_t i = 0; i < config->n_devices; i++) {
		struct fmha_error err;

		if (device_check(&config->devices[i], &err) == 0)
			continue;
		log_error("devices[%u]: %s", i, err.msg);
		n++;
	}
	return n;
}

/* systemd makes the folder when it starts the socket, so its absence is no fault of the file's. */
static void print_socket(const struct config *config)
{
	char folder[CONFIG_PATH_BYTES];
	struct stat st;
	char *slash;

	(void)snprintf(folder, sizeof(folder), "%s", config->socket);
	slash = strrchr(folder, '/');
	if (slash)
		slash[slash == folder] = '\0';
	(void)printf("socket   %s, mode %04o, group %s\n", config->socket, config->socket_mode,
		     config->socket_group[0] ? config->socket_group : "of the process");
	if (slash && stat(folder, &st) < 0)
		(void)printf("         %s: %s; systemd makes it, by hand: mkdir -p %s\n", folder,
			     strerror(errno), folder);
}

int check_configuration(const struct config *config, const char *path)
{
	if (check_group(config) + check_devices(config) > 0)
		return -1;
	(void)printf("%s %s\n", path, access(path, F_OK) == 0 ? "is fine" : "is absent: defaults");
	print_socket(config);
	if (config->metrics_socket[0])
		(void)printf("metrics  %s\n", config->metrics_socket);
	for (uint32_t i = 0; i < config->n_devices; i++)
		(void)printf("device   %u: %s%s%s\n", i, config->devices[i].backend,
			     config->devices[i].name[0] ? " " : "", config->devices[i].name);
	return fflush(stdout) == 0 ? 0 : -1;
}
