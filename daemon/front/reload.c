/* SPDX-License-Identifier: MIT */
/* reload.c: SIGHUP: the configuration, read again by a daemon that goes on serving. */
#include "process.h"

#include <string.h>

#include <base/clock.h>
#include <base/log.h>
#include <base/notify.h>

static void take_over(struct front *front, const struct config *next)
{
	char restart[512];
	uint32_t n = config_reload(&front->config, next, restart, sizeof(restart));

	log_set_level((enum log_level)front->config.log_level);
	memcpy(front->limits.value, front->config.limits, sizeof(front->limits.value));
	limits_resolve(&front->limits, limits_host_memory(), false);
	for (uint32_t i = 0; i < front->n_slots; i++)
		worker_process_configure(front->slots[i].process);
	log_info("configuration read again: %u keys have changed", n);
	if (restart[0])
		log_warning("configuration: a restart is needed for %s", restart);
}

void front_reload(struct front *front)
{
	struct config next;
	struct fmha_error err;

	notify_send("RELOADING=1\nMONOTONIC_USEC=%llu",
		    (unsigned long long)(clock_ns() / NS_PER_US));
	if (config_read(front->source, &next, &err) < 0)
		log_error("configuration not taken over, the old one stays: %s", err.msg);
	else
		take_over(front, &next);
	if (front->announced)
		notify_send("READY=1");
}
