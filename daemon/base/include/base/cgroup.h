/* SPDX-License-Identifier: MIT */
/* cgroup.h: what the kernel did to the processes of this one's control group. */
#ifndef FMHAD_BASE_CGROUP_H
#define FMHAD_BASE_CGROUP_H

#include <stdint.h>

/*
 * How many processes the kernel has killed for lack of memory in this process's control group and
 * below. @proc: "/proc", @sys: "/sys", or stand-ins. Return: 0 where there is no such count.
 */
uint64_t cgroup_oom_kills(const char *proc, const char *sys);

#endif
