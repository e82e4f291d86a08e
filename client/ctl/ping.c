/* SPDX-License-Identifier: MIT */
/* ping.c: is everybody there, and how far away. */
#include "ctl.h"
#include "json.h"

#include <stdio.h>
#include <stdlib.h>

#include <cjson/cJSON.h>

struct request {
	struct ctl_target target;
	int64_t count;
};

static const struct cli_option own_options[] = {{"count", 'n', "N",
						 "round trips to each (default 10)",
						 CLI_RANGE(INT, struct request, count, 1, 1000000)},
						CLI_END};

static int compare_times(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

/* Pings one peer: the front when @device is NULL. @list: NULL: for people */
static int ping_peer(struct fmha_client *client, struct fmha_device *device, const char *name,
		     int64_t count, cJSON *list)
{
	int64_t *times = calloc((size_t)count, sizeof(*times));
	struct fmha_error err = {0};
	int r = 0;

	if (!times)
		return ctl_usage_error("--count %lld: out of memory", (long long)count);
	for (int64_t i = 0; i < count && r == 0; i++) {
		int64_t start = ctl_now_ns();

		r = device ? fmha_device_ping(device, &err) : fmha_client_ping(client, &err);
		times[i] = ctl_now_ns() - start;
	}
	if (r < 0) {
		free(times);
		return ctl_error(&err);
	}
	qsort(times, (size_t)count, sizeof(*times), compare_times);
	if (list) {
		cJSON *item = ctl_add_item(list);

		cJSON_AddStringToObject(item, "peer", name);
		cJSON_AddNumberToObject(item, "min_ns", (double)times[0]);
		cJSON_AddNumberToObject(item, "median_ns", (double)times[count / 2]);
		cJSON_AddNumberToObject(item, "max_ns", (double)times[count - 1]);
	} else
		(void)printf("%-40s  %8.1f us min  %8.1f us median  %8.1f us max\n", name,
			     (double)times[0] / 1e3, (double)times[count / 2] / 1e3,
			     (double)times[count - 1] / 1e3);
	free(times);
	return CTL_OK;
}

static int ping_device(struct fmha_client *client, uint32_t index, int64_t count, cJSON *list)
{
	_cleanup_(ctl_device_freep) struct fmha_device *device = NULL;
	struct fmha_error err = {0};
	struct fmha_device_info info;
	char name[192];

	if (fmha_device_open(client, index, &device, &err) < 0 ||
	    fmha_device_info(device, &info, &err) < 0)
		return ctl_error(&err);
	(void)snprintf(name, sizeof(name), "device %u (%s, %s)", info.device, info.backend,
		       info.arch);
	return ping_peer(client, device, name, count, list);
}

static int ping_all(struct fmha_client *client, const struct ctl_target *target, int64_t count,
		    cJSON *list)
{
	struct fmha_device_info devices[64];
	struct fmha_client_info info;
	struct fmha_error err = {0};
	char name[192];
	size_t n;
	int r, worst;

	if (fmha_client_info(client, &info, &err) < 0)
		return ctl_error(&err);
	(void)snprintf(name, sizeof(name), "front %s (pid %u)", info.server, info.daemon_pid);
	worst = ping_peer(client, NULL, name, count, list);
	if (worst != CTL_OK)
		return worst;
	if (target->device != FMHA_ANY_DEVICE)
		return ping_device(client, target->device, count, list);
	if (fmha_client_devices(client, devices, sizeof(devices) / sizeof(devices[0]), &n, &err) <
	    0)
		return ctl_error(&err);
	for (size_t i = 0; i < n && i < sizeof(devices) / sizeof(devices[0]); i++) {
		r = ping_device(client, devices[i].device, count, list);
		if (r != CTL_OK)
			worst = r;
	}
	return worst;
}

static int ping(int argc, char **argv)
{
	struct request request = {.target = CTL_TARGET_INIT, .count = 10};
	_cleanup_(ctl_client_freep) struct fmha_client *client = NULL;
	cJSON *list = NULL;
	int r = ctl_options(&ctl_ping, argc, argv, &request.target, NULL, &request);

	if (r == 0)
		r = ctl_connect(&request.target, &client);
	if (r != 0)
		return r;
	if (request.target.json)
		list = cJSON_CreateArray();
	r = ping_all(client, &request.target, request.count, list);
	if (r == CTL_OK && list)
		r = ctl_print_json(list);
	else
		cJSON_Delete(list);
	return r;
}

const struct ctl_command ctl_ping = {
	.usage = {.name = "fmhactl ping",
		  .brief = "round trip to the daemon and to each device's worker",
		  .synopsis = "[--count N] [OPTION...]",
		  .text = "Asks the daemon's front, and the worker of one device or of all, for a "
			  "sign of life and prints the round trip times.",
		  .tables = {own_options, ctl_json_option, ctl_target_options}},
	.run = ping,
};
